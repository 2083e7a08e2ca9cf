"""Bar: 200 random SIGKILLs over short CPU trainings; every continuation ends bit by bit as the undisturbed run.

    python benchmarks/kill_soak.py [KILLS]

Prints one JSON line; any difference, or a checkpoint that cannot be read, is an error.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.soak import soak

if __name__ == "__main__":
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    print(json.dumps(found | {"seconds": round(time.perf_counter() - start, 1)}))
