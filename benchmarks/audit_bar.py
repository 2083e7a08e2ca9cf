"""Bar: 20 seeds of every method and clipping mode pass the white-box audit with a bound of at least 0.7 of the claim;
every broken engine is flagged. Writes results/audit/bar.json.

    python benchmarks/audit_bar.py [SEEDS]

All bounds of all audits hold together with 99.9 %: an intact engine fails here once in a thousand times at most.
"""

import json
import multiprocessing
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import broken

from lsg.audit.batches import audit_batches
from lsg.audit.report import CLIPPINGS, audited_method
from lsg.audit.white_box import audit_step
from lsg.methods import PRIVATE_METHODS
from lsg.step.clipping import Clipping
from lsg.train.provenance import provenance

CONFIDENCE, EPSILON, DELTA, TRIALS, SAMPLED_EPOCHS = 0.999, 3.0, 1e-5, 4000, 20
BROKEN = {
    "factors clipped one by one": (broken.factors_clipped_one_by_one, ("lsg", "rgp")),
    "noise forgotten on one layer": (broken.noise_forgotten_on_one_layer, PRIVATE_METHODS),
    "mask after the norm": (broken.mask_after_the_norm, ("lsg", "sparse-dpsgd")),
    "noise divided by the batch size twice": (broken.noise_divided_by_the_batch_size_twice, PRIVATE_METHODS),
    "half the noise": (broken.half_the_noise, PRIVATE_METHODS),
}


def step(
    method: str, clipping: Clipping, seed: int, alpha: float, damage: AbstractContextManager[None] | None = None
) -> dict[str, Any]:
    torch.set_num_threads(1)
    with damage or nullcontext():
        found = audit_step(
            audited_method(method), clipping, epsilon=EPSILON, delta=DELTA, trials=TRIALS, seed=seed, alpha=alpha
        )
    return {
        "method": method,
        "clipping": clipping,
        "seed": seed,
        "claimed_epsilon": found.claimed,
        "epsilon_at_least": found.bound,
        "ratio": found.bound / found.claimed,
        "largest_sensitivity_over_C": max(o.sensitivity.largest for o in found.observed),
        "violations": found.violations,
    }


def main(seeds: int) -> None:
    started = time.perf_counter()
    settings = list(product(PRIVATE_METHODS, CLIPPINGS, range(seeds)))
    alpha = (1 - CONFIDENCE) / (len(settings) + seeds)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        intact = pool.starmap(step, [(*setting, alpha) for setting in settings], chunksize=1)
    batches = [audit_batches(epochs=SAMPLED_EPOCHS, seed=seed, alpha=alpha).violations for seed in range(seeds)]
    damaged = [
        {"damage": name, **step(method, "flat", 0, alpha, damage())}
        for name, (damage, methods) in BROKEN.items()
        for method in methods
    ]
    with broken.shuffled_but_accounted_as_poisson():
        shuffled = audit_batches(epochs=SAMPLED_EPOCHS, seed=0, alpha=alpha).violations
    damaged.append({"damage": "shuffled batches accounted as Poisson", "violations": shuffled})
    ratios = [row["ratio"] for row in intact]
    summary = {
        "audits": len(intact),
        "intact_consistent": sum(not row["violations"] for row in intact) + sum(not found for found in batches),
        "intact_in_all": len(intact) + len(batches),
        "smallest_ratio": min(ratios),
        "largest_ratio": max(ratios),
        "broken_flagged": sum(bool(row["violations"]) for row in damaged),
        "broken_in_all": len(damaged),
        "seconds": round(time.perf_counter() - started),
    }
    document = {
        "provenance": provenance(),
        "plan": {"confidence": CONFIDENCE, "epsilon": EPSILON, "delta": DELTA, "trials": TRIALS, "seeds": seeds},
        "false_alarm_rate_of_an_audit": alpha,
        "summary": summary,
        "intact": intact,
        "batches": batches,
        "broken": damaged,
    }
    path = Path(__file__).parents[1] / "results" / "audit" / "bar.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(summary))
    passed = (
        summary["intact_consistent"] == summary["intact_in_all"]
        and summary["smallest_ratio"] >= 0.7
        and summary["broken_flagged"] == summary["broken_in_all"]
    )
    sys.exit(0 if passed else "the bar was missed")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
