"""SST-2 on a leased GPU: learning rate and clip tuned alike for every method, then the cells of `gpu-hour`.

    python benchmarks/gpu_sst2.py MODEL SST2 OUTPUT SECONDS

Tuning holds out VALIDATION records of the training set, trains TUNING_EPOCHS epochs of TUNING_RECORDS others with the
noise of the whole run at epsilon 3.3, and takes for each method the learning rate that is best with the smallest clip,
then the clip that is best with that learning rate. It leaves OUTPUT/tuning and OUTPUT/tuned.json; the cells go to
OUTPUT/cells, most wanted first. Start it again to go on.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_cells import Lease

from lsg.accounting import calibrate_noise
from lsg.experiments.config import METHODS, RunConfig
from lsg.experiments.scales import Workload, scale
from lsg.experiments.store import cell_name

LRS, CLIPS = (3e-4, 1e-3, 3e-3), (0.1, 1.0)
NON_PRIVATE_LRS = (2e-5, 5e-5, 1e-4)
VALIDATION, TUNING_RECORDS, TUNING_EPOCHS, RECORDS = 5000, 20_000, 5, 67_349


def tune(lease: Lease, config: RunConfig, noise_multiplier: float) -> dict[str, Any] | None:
    """-> the fields that are best for the configuration's method; None where time ran out."""

    def score(**fields: Any) -> float | None:
        noise = None if config.method == "non-private" else noise_multiplier
        plan = {"epsilon": None, "noise_multiplier": noise, "validation": VALIDATION}
        plan |= {"train_limit": TUNING_RECORDS, "epochs": TUNING_EPOCHS}
        name = "-".join([config.method, *(f"{key.replace('_', '-')}-{value:g}" for key, value in fields.items())])
        result = lease.run(name, replace(config, **plan, **fields))
        return None if result is None else result.score

    def best(choices: list[dict[str, Any]]) -> dict[str, Any] | None:
        scores = [score(**choice) for choice in choices]
        known = [(s, choice) for s, choice in zip(scores, choices, strict=True) if s is not None]
        return max(known, key=lambda pair: pair[0])[1] if len(known) == len(choices) else None

    if config.method == "non-private":
        return best([{"lr": lr} for lr in NON_PRIVATE_LRS])
    chosen = best([{"lr": lr, "max_grad_norm": CLIPS[0]} for lr in LRS])
    return None if chosen is None else best([{"lr": chosen["lr"], "max_grad_norm": clip} for clip in CLIPS])


def wanted(workload: Workload) -> list[RunConfig]:
    """The cells, in the order of their worth: a lease that ends early has the most telling ones."""
    low, high = sorted(workload.epsilons)

    def pair(epsilon: float, seed: int) -> list[RunConfig]:
        return [replace(workload.config(method, epsilon=epsilon), seed=seed) for method in ("lsg", "rgp")]

    def full_rank(epsilon: float) -> list[RunConfig]:
        return [workload.config(method, epsilon=epsilon) for method in ("dpsgd", "sparse-dpsgd")]

    random, factor, direct = (workload.config("lsg", importance=kind) for kind in ("random", "factor", "direct"))
    cells = [*pair(high, 0), workload.config("non-private"), *pair(low, 0), *pair(high, 1), *pair(high, 2)]
    cells += [*full_rank(high), random, *pair(low, 1), *pair(low, 2), factor, direct, *full_rank(low)]
    return [*cells, workload.config("sparse-dpsgd", importance="random")]


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
    tuned: dict[str, Any] = {}
    for method in METHODS:
        found = tune(lease, replace(workload, tuned={}).config(method), noise)
        if found is not None:
            tuned[method] = found
            print(f"tuned {method}: {found}", flush=True)
    (output / "tuned.json").write_text(json.dumps(tuned, indent=1) + "\n")
    lease.store = output / "cells"
    for config in wanted(replace(workload, tuned=tuned)):
        if config.method in tuned:
            lease.run(cell_name(config), config)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
