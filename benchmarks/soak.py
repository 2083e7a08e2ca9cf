"""Bar: a soak of 10,000 steps on a CPU: memory does not grow, and the ledger's epsilon is the plan's.

    python benchmarks/soak.py [STEPS] [--output results/soak/soak.json]

A small model trains with LSG, a ledger on disk and checkpoints now and then, as a long run would. A difference in
epsilon or growth of memory is an error.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.endurance import missed, soak

from lsg.train.provenance import provenance

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=10_000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        result = soak(arguments.steps, Path(temporary))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result | {"provenance": provenance()}, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "memory"}))
    if missed(result):
        raise SystemExit(f"grew: {', '.join(missed(result))}")
