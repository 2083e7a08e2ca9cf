"""Bar: one of three workers of `torchrun -m lsg train` is killed at random moments, 30 times each with and without
elastic restart; every run ends as an undisturbed one: same weights to the bit, same ε, same ledger.

    python benchmarks/kill_ranks.py [KILLS]

Writes results/kills/ranks.json; any difference, or a worker that lives on for half a minute, is an error.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.killed_ranks import LONGEST, RANKS, RUN, kill_ranks

from lsg.train.provenance import provenance

SEED = 0

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=30)
    arguments = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: kill_ranks(
                Path(folder),
                arguments.kills,
                seed=SEED,
                elastic=name == "elastic",
                tell=lambda line: print(line, flush=True),
            )
            for name in ("elastic", "resumed")
        }
        result = json.loads((Path(folder) / "whole" / "result.json").read_text())
    document = {
        **found,
        "ranks": RANKS,
        "allowed_wait_seconds": LONGEST,
        "seed": SEED,
        "run": " ".join(RUN),
        "epsilon": result["epsilon"],
        "steps": result["steps"],
        "seconds": round(time.perf_counter() - start, 1),
        "provenance": provenance(),
    }
    output = Path(__file__).parents[1] / "results" / "kills" / "ranks.json"
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(output.read_text())
