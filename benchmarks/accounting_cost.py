"""What accounting of a noise schedule costs: ε of a history with many noises, and the check before each step.

    python benchmarks/accounting_cost.py [--against OLD_SRC]     # beside another source tree, without PLD

Each accountant is measured in a process of its own, on one thread, after its libraries have been imported. Seconds are
processor time. Bar: a call takes less than 0.1 s once the history before it has been composed. Writes
results/bench/accounting-cpu.json.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "bench" / "accounting-cpu.json"
DELTA, NOISES, MORE, SCHEDULED = 1e-5, 150, 20, 7
PLAN = {"target_epsilon": 3.3, "target_delta": DELTA, "sample_rate": 2000 / 67349, "steps": 673}  # SST-2, 20 epochs


def seconds(call: Callable[[], Any]) -> float:
    """Of processor time, which other programs on the machine change little."""
    began = time.process_time()
    call()
    return time.process_time() - began


def measure(name: str, *, all_parts: bool) -> dict[str, Any]:
    """all_parts: False leaves out what takes minutes where a history is composed anew for each call."""
    from lsg.accounting import calibrate_noise, create_accountant
    from lsg.accounting.phases import Phase
    from lsg.accounting.step_accounting import Target
    from lsg.train.provenance import provenance

    warm = create_accountant(name)
    for noise in (1.31, 1.32):
        warm.step(noise_multiplier=noise, sample_rate=0.02)
    warm.get_epsilon(DELTA)
    gc.freeze()  # else a garbage collection that falls into a call looks at all that the imports have made, for 0.2 s

    ledger = create_accountant(name)
    for number in range(NOISES):
        ledger.step(noise_multiplier=2.0 - number / NOISES, sample_rate=0.01)
    found: dict[str, Any] = {
        "first": seconds(lambda: ledger.get_epsilon(DELTA)),
        "again": seconds(lambda: ledger.get_epsilon(DELTA)),
        "epsilon": ledger.get_epsilon(DELTA),
        "commit": provenance()["commit"],
    }

    scheduled = create_accountant(name)
    target = Target(scheduled, epsilon=3.0, delta=DELTA, planned=Phase(1.1, 0.01, 1000))
    checks = []
    for number in range(NOISES if all_parts else SCHEDULED):
        noise, rate = 1.1 * 0.998**number, 0.01 + 0.002 * (number % 3)
        checks.append(seconds(lambda noise=noise, rate=rate: target.check(noise, rate)))
        scheduled.step(noise_multiplier=noise, sample_rate=rate)
    found["scheduled"] = sum(checks[:SCHEDULED])
    if all_parts:
        found |= {"check": statistics.median(checks), "check_longest": max(checks)}
        more = []
        for number in range(MORE):
            ledger.step(noise_multiplier=0.99 - number / NOISES, sample_rate=0.01)
            more.append(seconds(lambda: ledger.get_epsilon(DELTA)))
        found |= {"more": statistics.median(more), "more_longest": max(more)}
    found["calibration"] = seconds(lambda: calibrate_noise(accountant=name, **PLAN))
    return found


def measured_apart(name: str, source: Path, *options: str) -> dict[str, Any]:
    """`measure` in a process of its own, with the lsg of that source tree."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure", name, *options]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    print(name, source, found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the src folder of another checkout")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--short", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, all_parts=not options.short)))
        return
    result: dict[str, Any] = {"now": {name: measured_apart(name, ROOT / "src") for name in ("prv", "pld", "rdp")}}
    if options.against:
        result["before"] = {name: measured_apart(name, options.against, "--short") for name in ("prv", "rdp")}
    from lsg.train.provenance import provenance

    RESULTS.write_text(json.dumps({**result, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
