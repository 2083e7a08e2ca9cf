"""Do cheap runs rank settings as full runs do? Candidates of `lsg tune` on digits, in full and with smaller batches.

    python benchmarks/tune_surrogates.py OUTPUT.json

Every candidate is trained in full on the training images, and by stand-ins (lsg.tune.stand_in) whose batches are 2, 4
and 8 times smaller, with other seeds. All are scored on the test images: this is about ranks, and nothing is released.
About 40 minutes on one idle core. An OUTPUT that is there already is gone on with.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lsg.accounting.calibration import calibrate_noise
from lsg.sampling.plan import SamplingPlan
from lsg.tasks.digits import TRAIN_IMAGES
from lsg.train.config import RunConfig
from lsg.train.presets import preset
from lsg.train.provenance import provenance
from lsg.train.run import run
from lsg.tune.candidates import candidates, usual_variations
from lsg.tune.stand_in import stand_in

EPSILON, SHRINKS, SEEDS = 3.0, (8, 4, 1, 2), range(3)


def noise_of(config: RunConfig) -> float:
    rate, steps = SamplingPlan(TRAIN_IMAGES, config.batch_size).accounted(config.epochs)
    return calibrate_noise(
        accountant="prv", target_epsilon=EPSILON, target_delta=config.delta, sample_rate=rate, steps=steps
    )


def trained(config: RunConfig, shrink: int, seed: int) -> dict[str, Any]:
    """Shrink 1 is the full run. Stand-ins have seeds of their own, so that no luck is shared."""
    instead = stand_in(config, noise_of(config), records=TRAIN_IMAGES, own_records=TRAIN_IMAGES, shrink=shrink)
    with tempfile.TemporaryDirectory() as folder:
        result = run(replace(instead, seed=1000 * shrink + seed), Path(folder) / "run")
    return {
        "batch_size": instead.batch_size,
        "epochs": instead.epochs,
        "noise_multiplier": instead.noise_multiplier,
        "steps": result.steps,
        "score": result.score,
        "seconds": result.seconds,
    }


def main(output: Path) -> None:
    torch.set_num_threads(1)
    base = RunConfig(task="digits", epsilon=EPSILON, device="cpu", **preset("digits", "lsg"))
    varied = usual_variations(base)
    rows = json.loads(output.read_text())["runs"] if output.is_file() else []
    done = {(str(row["settings"]), row["shrink"], row["seed"]) for row in rows}
    for seed in SEEDS:
        for shrink in SHRINKS:
            for config in candidates(base, varied):
                settings = {name: getattr(config, name) for name in varied}
                if (str(settings), shrink, seed) in done:
                    continue
                rows.append({"settings": settings, "shrink": shrink, "seed": seed} | trained(config, shrink, seed))
                found = {"config": base.to_dict(), "varied": varied, "runs": rows, "provenance": provenance()}
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(found, indent=1) + "\n")
            print(f"seed {seed}, batches / {shrink}: done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
