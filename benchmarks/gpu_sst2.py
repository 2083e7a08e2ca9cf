"""SST-2 on a leased GPU: learning rate and clip tuned alike for every method, then the cells of `gpu-hour`.

    python benchmarks/gpu_sst2.py MODEL SST2 OUTPUT SECONDS

Tuning holds out VALIDATION (a share) of the training set and trains TUNING_EPOCHS epochs of TUNING (a share) of the
others with the noise of the whole run at epsilon 3.3, for each method with every learning rate and clip. The FINALISTS
best train FINAL_EPOCHS epochs (too large a rate does well at first), and the best of those is taken. It leaves
OUTPUT/tuning and OUTPUT/tuned.json; the cells go to OUTPUT/cells, most wanted first. Start it again to go on; methods
that tuned.json names are not tuned again.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_cells import Lease

from lsg.accounting import calibrate_noise
from lsg.reproduce.scales import scale
from lsg.reproduce.store import cell_name
from lsg.reproduce.workload import Workload
from lsg.train.config import RunConfig

LRS, CLIPS = (3e-4, 1e-3, 3e-3), (0.1, 1.0)
NON_PRIVATE_LRS = (2e-5, 5e-5, 1e-4)
VALIDATION, TUNING, RECORDS = 0.075, 0.32, 67_349
TUNING_EPOCHS, FINALISTS, FINAL_EPOCHS = 5, 3, 10


def tune(lease: Lease, config: RunConfig, noise_multiplier: float) -> dict[str, Any] | None:
    """-> the fields to take for the configuration's method; None where time ran out."""
    noise = None if config.method == "non-private" else noise_multiplier
    plan = {"epsilon": None, "noise_multiplier": noise, "validation": VALIDATION, "train_limit": TUNING}

    def ranked(choices: list[dict[str, Any]], epochs: int) -> list[dict[str, Any]]:
        """Best first; nothing where time ran out."""
        results = []
        for fields in choices:
            name = "-".join([config.method, *(f"{key.replace('_', '-')}-{value:g}" for key, value in fields.items())])
            folder = name if epochs == TUNING_EPOCHS else f"{name}-epochs-{epochs}"
            result = lease.run(folder, replace(config, **plan, epochs=epochs, **fields))
            if result is None:
                return []
            results.append((result.score, fields))
        return [fields for _, fields in sorted(results, key=lambda pair: -pair[0])]

    choices: list[dict[str, Any]] = [{"lr": lr, "max_grad_norm": clip} for lr in LRS for clip in CLIPS]
    if config.method == "non-private":
        choices = [{"lr": lr} for lr in NON_PRIVATE_LRS]
    found = ranked(ranked(choices, TUNING_EPOCHS)[:FINALISTS], FINAL_EPOCHS)
    return found[0] if found else None


def wanted(workload: Workload) -> list[list[RunConfig]]:
    """The cells, in the order of their worth: a lease that ends early has the most telling ones."""
    low, high = sorted(workload.epsilons)

    def seeds(method: str, epsilon: float) -> list[RunConfig]:
        return [replace(workload.config(method, epsilon=epsilon), seed=seed) for seed in range(3)]

    def full_rank(epsilon: float) -> list[RunConfig]:
        return [workload.config(method, epsilon=epsilon) for method in ("dpsgd", "sparse-dpsgd")]

    low_rank = [cell for epsilon in (high, low) for method in ("lsg", "rgp") for cell in seeds(method, epsilon)]
    variants = [workload.config("lsg", importance=kind) for kind in ("random", "factor", "direct")]
    rest = [*variants, *full_rank(low), workload.config("sparse-dpsgd", importance="random")]
    return [[*low_rank, workload.config("non-private")], full_rank(high), rest]


def main(model: str, data: str, output: Path, seconds: float) -> None:
    workload = scale("gpu-hour").using({"text": data}, {"text": model}).negatives
    plan = workload.config("lsg")
    noise = calibrate_noise(
        accountant=plan.accountant,
        target_epsilon=workload.epsilon,
        target_delta=plan.delta,
        sample_rate=plan.batch_size / RECORDS,
        steps=plan.epochs * (RECORDS // plan.batch_size + 1),
    )
    lease = Lease(output / "tuning", seconds, RECORDS)
    file = output / "tuned.json"
    tuned: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for part in wanted(workload):
        for method in dict.fromkeys(config.method for config in part if config.method not in tuned):
            lease.store = output / "tuning"
            found = tune(lease, replace(workload, tuned={}).config(method), noise)
            if found is not None:
                tuned[method] = found
                print(f"tuned {method}: {found}", flush=True)
        file.write_text(json.dumps(tuned, indent=1) + "\n")
        lease.store = output / "cells"
        for config in part:
            if config.method in tuned:
                lease.run(cell_name(config), replace(config, **tuned[config.method]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
