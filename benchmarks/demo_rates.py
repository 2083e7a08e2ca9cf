"""Which learning rate does each method of `lsg demo` take? The same rates are tried for all of them.

    python benchmarks/demo_rates.py OUTPUT.jsonl

A row of OUTPUT is one run of `lsg train` on digits with the demo's network, scored on a fifth of the training images,
on which it does not train; no test image is used. The last lines printed are the mean scores by method and rate over
all ε and seeds: the demo has the best rate of each method. Rows that OUTPUT has already are not run again. About five
minutes of one core. This search is not part of any ε.
"""

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from lsg.train.config import RunConfig
from lsg.train.presets import preset
from lsg.train.provenance import provenance
from lsg.train.run import run

METHODS, EPSILONS, RATES, SEEDS = ("lsg", "rgp", "dpsgd"), (1.0, 3.0), (0.05, 0.1, 0.2, 0.4, 0.8, 1.6), (100,)


def settings(method: str, epsilon: float, lr: float, seed: int) -> RunConfig:
    own = {"task": "digits", "model": "small-cnn", "method": method, "epsilon": epsilon, "lr": lr, "epochs": 20}
    return RunConfig(**{**preset("digits", method), **own, "seed": seed, "validation": 0.2, "device": "cpu"})


def main(output: Path) -> None:
    torch.set_num_threads(1)
    origin = provenance()
    rows: list[dict[str, Any]] = []
    if output.exists():
        rows = [json.loads(line) for line in output.read_text().splitlines()]
    for seed, epsilon, method, lr in itertools.product(SEEDS, EPSILONS, METHODS, RATES):
        config = settings(method, epsilon, lr, seed)
        if any(row["config"] == config.to_dict() for row in rows):
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = run(config, Path(folder) / "run")
        rows.append({"config": config.to_dict(), "score": result.score, "seconds": result.seconds, **origin})
        with output.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(f"{method}, ε = {epsilon:g}, rate {lr:g}, seed {seed}: {100 * result.score:.1f} %", flush=True)
    for method, lr in itertools.product(METHODS, RATES):
        scores = [row["score"] for row in rows if row["config"]["method"] == method and row["config"]["lr"] == lr]
        print(f"{method}, rate {lr:g}: {100 * statistics.mean(scores):.1f} %")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
