"""The layers and argument grids of Opacus's own tests, by DPSGD and by LSG: right, or refused by name?

    OMP_NUM_THREADS=1 python benchmarks/opacus_grids.py [--only Conv1d ...] [--output results/opacus/grids.json]

Run from the repository's root. Each cell (`tests/support/opacus_grids.py`) is made private and takes a noisy step; its
per-sample gradients are compared with batches of one. Stored: counts by layer, and each reason for a refusal with its
count and the first cell that it met. Exit status 1 if anything was wrong or crashed.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tests`

import opacus
from tests.support.opacus_grids import cells
from tests.support.opacus_judge import TOLERANCE, judge

from lsg import DPSGD, LSG
from lsg.train.provenance import provenance

METHODS = (DPSGD(), LSG(rank=2, sparsity=0.5))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    origin = provenance()
    layers: dict[str, Any] = {}
    for cell in cells():
        if given.only is None or cell.layer in given.only:
            found = layers.setdefault(cell.layer, {"cells": 0, "outcomes": Counter(), "refused": [], "bad": []})
            found["cells"] += 1
            for method in METHODS:
                outcome, why = judge(cell, method)
                found["outcomes"][outcome] += 1
                note(found, outcome, {"why": why, "arguments": cell.arguments, "method": type(method).__name__})
    bad = [{"layer": layer, **each} for layer, found in layers.items() for each in found["bad"]]
    for each in bad:
        print(json.dumps(each))
    print(json.dumps({layer: found["outcomes"] for layer, found in layers.items()}, indent=1))
    if given.output:
        versions = {"tolerance": TOLERANCE, "opacus": opacus.__version__, "methods": [repr(m) for m in METHODS]}
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps({"provenance": origin, **versions, "layers": layers}, indent=1) + "\n")
    return 1 if bad else 0


def note(found: dict[str, Any], outcome: str, case: dict[str, Any]) -> None:
    """A refusal is counted with those that say the same; what is wrong is kept whole."""
    if outcome == "refused":
        same = next((each for each in found["refused"] if each["why"] == case["why"]), None)
        if same is None:
            found["refused"].append({"count": 1, **case})
        else:
            same["count"] += 1
    elif outcome != "right":
        found["bad"].append({"outcome": outcome, **case})


if __name__ == "__main__":
    raise SystemExit(main())
