"""Bar: 20 seeds of every method and clipping mode pass the white-box audit with a bound of at least 0.7 of the claim;
every broken engine is flagged. Writes results/audit/bar.json, or units.json where canaries are whole units.

    python benchmarks/audit_bar.py [SEEDS] [--units]

All bounds of all audits hold together with 99.9 %: an intact engine fails here once in a thousand times at most.
"""

import argparse
import json
import multiprocessing
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import broken

from lsg.audit.batches import audit_batches
from lsg.audit.report import audited_method
from lsg.audit.rig import ONE_RECORD, UnitShape
from lsg.audit.settings import CLIPPINGS
from lsg.audit.white_box import audit_step
from lsg.methods import PRIVATE_METHODS, Clipping
from lsg.train.provenance import provenance

CONFIDENCE, EPSILON, DELTA, TRIALS, SAMPLED_EPOCHS = 0.999, 3.0, 1e-5, 4000, 20
BROKEN = {
    "factors clipped one by one": (broken.factors_clipped_one_by_one, ("lsg", "rgp")),
    "noise forgotten on one layer": (broken.noise_forgotten_on_one_layer, PRIVATE_METHODS),
    "mask after the norm": (broken.mask_after_the_norm, ("lsg", "sparse-dpsgd")),
    "noise divided by the batch size twice": (broken.noise_divided_by_the_batch_size_twice, PRIVATE_METHODS),
    "half the noise": (broken.half_the_noise, PRIVATE_METHODS),
}
UNITS = UnitShape(records=3, views=2)
BROKEN_UNITS = {
    "each row of a unit clipped by itself": (broken.each_record_of_a_unit_clipped_by_itself, PRIVATE_METHODS),
    "noise for one of three records": (broken.noise_for_one_of_three_records, PRIVATE_METHODS),
}
BROKEN_BATCHES = {"shuffled batches accounted as Poisson": broken.shuffled_but_accounted_as_poisson}
BROKEN_UNIT_BATCHES = {
    "a unit drawn with any of its records": broken.a_unit_drawn_with_any_of_its_records,
    "records of a unit drawn one by one": broken.records_of_a_unit_drawn_one_by_one,
}


def step(
    method: str,
    clipping: Clipping,
    seed: int,
    alpha: float,
    unit: UnitShape,
    damage: AbstractContextManager[None] | None = None,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    with damage or nullcontext():
        found = audit_step(
            audited_method(method),
            clipping,
            epsilon=EPSILON,
            delta=DELTA,
            trials=TRIALS,
            seed=seed,
            alpha=alpha,
            unit=unit,
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


def main(seeds: int, units: bool) -> None:
    started = time.perf_counter()
    unit = UNITS if units else ONE_RECORD
    shape = asdict(unit) if units else {}
    faults, batch_faults = (BROKEN_UNITS, BROKEN_UNIT_BATCHES) if units else (BROKEN, BROKEN_BATCHES)
    settings = list(product(PRIVATE_METHODS, CLIPPINGS, range(seeds)))
    alpha = (1 - CONFIDENCE) / (len(settings) + seeds)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        intact = pool.starmap(step, [(*setting, alpha, unit) for setting in settings], chunksize=1)
    sampled: dict[str, Any] = {"epochs": SAMPLED_EPOCHS, "alpha": alpha, "unit": unit}
    batches = [audit_batches(seed=seed, **sampled).violations for seed in range(seeds)]
    damaged = [
        {"damage": name, **step(method, "flat", 0, alpha, unit, damage())}
        for name, (damage, methods) in faults.items()
        for method in methods
    ]
    for name, damage in batch_faults.items():
        with damage():
            damaged.append({"damage": name, "violations": audit_batches(seed=0, **sampled).violations})
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
        "plan": {
            "confidence": CONFIDENCE,
            "epsilon": EPSILON,
            "delta": DELTA,
            "trials": TRIALS,
            "seeds": seeds,
            **shape,
        },
        "false_alarm_rate_of_an_audit": alpha,
        "summary": summary,
        "intact": intact,
        "batches": batches,
        "broken": damaged,
    }
    path = Path(__file__).parents[1] / "results" / "audit" / ("units.json" if units else "bar.json")
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=20)
    parser.add_argument("--units", action="store_true")
    arguments = parser.parse_args()
    main(arguments.seeds, arguments.units)
