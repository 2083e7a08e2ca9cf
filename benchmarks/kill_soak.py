"""Bar: 200 random SIGKILLs over short CPU trainings; every continuation ends bit by bit as the undisturbed run.

    python benchmarks/kill_soak.py [KILLS]

Writes results/kills/kills.json; any difference, or a checkpoint that cannot be read, is an error.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.soak import soak

from lsg.train.provenance import provenance

if __name__ == "__main__":
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    document = found | {"seconds": round(time.perf_counter() - start, 1), "provenance": provenance()}
    output = Path(__file__).parents[1] / "results" / "kills" / "kills.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(output.read_text())
