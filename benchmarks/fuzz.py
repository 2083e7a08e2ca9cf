"""Bar: 10,000 cases of hostile input to the command line: no traceback, no hang over 10 s, no write outside the output
folder, nothing that existed lost.

    python benchmarks/fuzz.py [CASES] [--seed 0] [--first 0] [--workers 1]

Writes results/fuzz/fuzz.json; any fault is an error, and is printed as it is found.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.fuzz import PATIENCE, faults

from lsg.train.provenance import provenance


def printed(folder: Path, seed: int, numbers: range) -> "list[dict[str, Any]]":
    """The faults among those cases, each printed when it is found."""
    found = []
    folder.mkdir()
    for fault in faults(folder, seed, numbers):
        found.append(fault)
        print(json.dumps(fault, indent=1), flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "fuzz" / "fuzz.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of models that are looked at and never trained
    origin, start = provenance(), time.perf_counter()
    numbers = range(arguments.first, arguments.first + arguments.cases)
    workers = arguments.workers
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(workers) as pool:
        parts = [(Path(folder) / str(n), arguments.seed, numbers[n::workers]) for n in range(workers)]
        found = [fault for part in pool.starmap(printed, parts) for fault in part]
    document = {
        "seed": arguments.seed,
        "cases": len(numbers),
        "seconds_allowed_for_a_case": PATIENCE,
        "faults": found,
        "seconds": round(time.perf_counter() - start, 1),
        "provenance": origin,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{len(numbers):,} cases, {len(found)} faults, {document['seconds']} s")
    sys.exit(bool(found))
