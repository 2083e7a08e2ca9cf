"""Bar: 200 random SIGKILLs over short CPU trainings; every continuation ends bit by bit as the undisturbed run.

    python benchmarks/kill_soak.py [KILLS] [--units]

Writes results/kills/kills.json, or units.json of runs with `unit_of` and `views`; any difference, or a checkpoint that
cannot be read, is an error.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.small_run import UNITS
from tests.support.soak import soak

from lsg.train.provenance import provenance

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=200)
    parser.add_argument("--units", action="store_true")
    arguments = parser.parse_args()
    options = UNITS if arguments.units else {}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), arguments.kills, **options)
    document = {
        **found,
        **({"options": options} if options else {}),
        "seconds": round(time.perf_counter() - start, 1),
        "provenance": provenance(),
    }
    output = Path(__file__).parents[1] / "results" / "kills" / ("units.json" if options else "kills.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(output.read_text())
