"""SST-2 on a leased GPU: learning rate and clip tuned alike for every method, then the cells of `gpu-hour`.

    python benchmarks/gpu_sst2.py MODEL SST2 OUTPUT SECONDS

Tuning holds out VALIDATION records of the training set and trains TUNING_EPOCHS epochs of TUNING_RECORDS others with
the noise of the whole run at epsilon 3.3, for each method with every learning rate and clip. Of the settings within one
standard error of the best accuracy, which it cannot tell apart, it takes the one with the lowest training loss in the
last epoch: too large a rate shows there first. It leaves OUTPUT/tuning and OUTPUT/tuned.json; the cells go to
OUTPUT/cells, most wanted first. Start it again to go on.
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_cells import Lease

from lsg.accounting import calibrate_noise
from lsg.experiments.config import RunConfig
from lsg.experiments.run import RunResult
from lsg.experiments.scales import Workload, scale
from lsg.experiments.store import cell_name

LRS, CLIPS = (3e-4, 1e-3, 3e-3), (0.1, 1.0)
NON_PRIVATE_LRS = (2e-5, 5e-5, 1e-4)
VALIDATION, TUNING_RECORDS, TUNING_EPOCHS, RECORDS = 5000, 20_000, 5, 67_349


def tune(lease: Lease, config: RunConfig, noise_multiplier: float) -> dict[str, Any] | None:
    """-> the fields to take for the configuration's method; None where time ran out."""
    noise = None if config.method == "non-private" else noise_multiplier
    plan = {"epsilon": None, "noise_multiplier": noise, "validation": VALIDATION}
    plan |= {"train_limit": TUNING_RECORDS, "epochs": TUNING_EPOCHS}
    choices: list[dict[str, Any]] = [{"lr": lr, "max_grad_norm": clip} for lr in LRS for clip in CLIPS]
    if config.method == "non-private":
        choices = [{"lr": lr} for lr in NON_PRIVATE_LRS]
    results = []
    for fields in choices:
        name = "-".join([config.method, *(f"{key.replace('_', '-')}-{value:g}" for key, value in fields.items())])
        results.append((lease.run(name, replace(config, **plan, **fields)), fields))
    known = [(result, fields) for result, fields in results if result is not None]
    return take(known) if len(known) == len(choices) else None


def take(known: list[tuple[RunResult, dict[str, Any]]]) -> dict[str, Any]:
    """Of the results within one standard error of the best score the one with the lowest loss: its fields."""
    best = max(result.score for result, _ in known)
    error = math.sqrt(best * (1 - best) / VALIDATION)
    near = [pair for pair in known if pair[0].score >= best - error]
    return min(near, key=lambda pair: pair[0].history[-1]["loss"])[1]


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
    tuned: dict[str, Any] = {}
    for part in wanted(workload):
        for method in dict.fromkeys(config.method for config in part if config.method not in tuned):
            lease.store = output / "tuning"
            found = tune(lease, replace(workload, tuned={}).config(method), noise)
            if found is not None:
                tuned[method] = found
                print(f"tuned {method}: {found}", flush=True)
        (output / "tuned.json").write_text(json.dumps(tuned, indent=1) + "\n")
        lease.store = output / "cells"
        for config in part:
            if config.method in tuned:
                lease.run(cell_name(config), replace(config, **tuned[config.method]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
