"""Bar: SIGINT and SIGTERM at 100 random moments of `lsg train`, from the first millisecond: never a traceback, never a
half-written file, and every continuation ends bit by bit as the undisturbed run.

    python benchmarks/kill_signals.py [STOPS] [--seed 0] [--workers 1]

Writes results/kills/signals.json; any fault is an error.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.stops import stop_often

from lsg.train.provenance import provenance

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stops", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    origin, start = provenance(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = stop_often(Path(folder), arguments.stops, arguments.seed, arguments.workers)
    document = {
        "seed": arguments.seed,
        **found,
        "seconds": round(time.perf_counter() - start, 1),
        "provenance": origin,
    }
    output = Path(__file__).parents[1] / "results" / "kills" / "signals.json"
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    summary = {key: value for key, value in document.items() if key != "attempts"}
    print(json.dumps(summary, indent=1))
    sys.exit(bool(found["stops_with_faults"] or found["runs_that_ended_otherwise"]))
