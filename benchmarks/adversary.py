"""Bar: of 20,000 random models none is trained wrongly without an error, and none crashes.

    python benchmarks/adversary.py [--graphs 20000] [--first 0] [--processes 2]
    python benchmarks/adversary.py --seed-of 4711      # one graph: what it is and what came of it

Run from the repository's root, with its own `src` first on PYTHONPATH. Writes results/adversary/report.json: counts by
outcome, clean graphs that were refused, by reason, and the seeds of every failure. Seeds are numbered through, so any
of them can be repeated. Exit status 1 if anything was silent or crashed.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: processes share the cores, not threads
sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tests`

import torch
from tests.adversarial.graphs import draw_program, draw_trial
from tests.adversarial.oracle import drive, judge
from tests.adversarial.outcome import Outcome

from lsg.train.provenance import provenance

OUTPUT = Path(__file__).parents[1] / "results" / "adversary" / "report.json"
_LISTED = 2000  # failures of each kind that are described


def attack(seed: int) -> tuple[int, Outcome, float]:
    start = time.perf_counter()
    return seed, judge(draw_trial(seed)), time.perf_counter() - start


def run(seeds: Iterable[int], processes: int, seconds: float) -> list[tuple[int, Outcome, float]]:
    """All attacks, with progress; as many as there is time for."""
    seeds = list(seeds)
    found, counts, start = [], Counter[str](), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        for result in pool.imap_unordered(attack, seeds, chunksize=20):
            found.append(result)
            counts[result[1].kind] += 1
            if result[1].kind in ("silent", "crash"):
                print(f"seed {result[0]}: {result[1]}", flush=True)
            if time.monotonic() - start > seconds:
                print(f"time is up after {len(found)} graphs", flush=True)
                break
            if len(found) % 200 == 0 or len(found) == len(seeds):
                rate = len(found) / (time.monotonic() - start)
                left = (len(seeds) - len(found)) / rate
                print(f"{len(found)} of {len(seeds)}, {rate:.1f}/s, {left:.0f} s left: {dict(counts)}", flush=True)
    return sorted(found, key=lambda result: result[0])


def report(found: list[tuple[int, Outcome, float]], elapsed: float) -> dict[str, Any]:
    valid = [(seed, o) for seed, o, _ in found if o.kind != "invalid"]
    clean = [(seed, o) for seed, o in valid if o.clean]
    refused = Counter(o.reason for _, o in clean if o.kind == "refused")
    return {
        "graphs": len(found),
        "first_seed": found[0][0],
        "elapsed_seconds": round(elapsed, 1),
        "graphs_per_second": round(len(found) / elapsed, 1),
        "slowest_seconds": round(max(seconds for *_, seconds in found), 2),
        "outcomes": {
            label: dict(Counter(o.kind for _, o in valid if o.clean == flag))
            for label, flag in (("clean", True), ("mixing", False))
        },
        "invalid": len(found) - len(valid),
        "clean_refused_share": round(sum(refused.values()) / max(1, len(clean)), 4),
        "clean_refused_by_reason": {
            reason: {"graphs": count, "share_of_clean": round(count / len(clean), 4)}
            for reason, count in refused.most_common()
        },
        "mixing_refused_by_reason": dict(
            Counter(o.reason for _, o in valid if not o.clean and o.kind == "refused").most_common()
        ),
        # Records influence each other in the plain model, yet all that lsg did was right (a gate that stays shut).
        "mixing_but_right": [seed for seed, o in valid if not o.clean and o.kind == "right"],
        "failures": {
            kind: {str(seed): _described(seed, o) for seed, o in [(s, o) for s, o in valid if o.kind == kind][:_LISTED]}
            for kind in ("silent", "crash")
        },
        **provenance(),
    }


def _described(seed: int, outcome: Outcome) -> str:
    return f"{'clean' if outcome.clean else 'mixing'}; {draw_program(seed)}; {outcome.detail}"


def show(seed: int) -> None:
    """One attack in words, and the traceback of whatever it raises."""
    trial = draw_trial(seed)
    print(draw_program(seed), trial.method, trial.reduction, trial.modes or "training", sep="\n")
    for batch in trial.batches:
        print([None if t is None else tuple(t.shape) for t in batch.args], "NaN" if _broken(batch.args[0]) else "")
    print(trial.build(), judge(trial), sep="\n")
    drive(trial)


def _broken(x: torch.Tensor) -> bool:
    return bool(x.isnan().any())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--seed-of", type=int, metavar="K", help="repeat attack K alone, and show it")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    if arguments.seed_of is not None:
        return show(arguments.seed_of)
    start = time.monotonic()
    found = run(range(arguments.first, arguments.first + arguments.graphs), arguments.processes, arguments.seconds)
    result = report(found, time.monotonic() - start)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("outcomes", "clean_refused_share", "clean_refused_by_reason")}))
    sys.exit(any(result["failures"].values()))


if __name__ == "__main__":
    main()
