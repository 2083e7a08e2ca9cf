"""Does LSG gain over RGP where gradients are clipped more? Accuracy on digits, by clip and epsilon.

    python benchmarks/clip_study.py OUTPUT.json

For each method, clip and epsilon the learning rate is the best of LRS_BY_CLIP / clip on VALIDATION (a share) of the
training images, over TUNING_SEEDS; accuracy on the test images is then that of runs with other SEEDS. Settings are
those of scale `cpu-minutes`. About 25 minutes on two cores.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lsg.reproduce.scales import scale
from lsg.train.config import RunConfig
from lsg.train.provenance import provenance
from lsg.train.run import run

METHODS = {"rgp": {}, "lsg": {}, "lsg-random": {"importance": "random"}}
CLIPS, EPSILONS, LRS_BY_CLIP = (0.1, 1.0, 10.0), (0.8, 3.3), (0.1, 0.2, 0.4, 0.8)
VALIDATION, TUNING_SEEDS, SEEDS = 0.2, range(100, 104), range(10)


def configured(method: str, epsilon: float, clip: float) -> RunConfig:
    workload = scale("cpu-minutes").image
    name = method.split("-")[0]
    config = workload.config(name, epsilon=epsilon, rank=8, sparsity=0.5 if name == "lsg" else 0.0, **METHODS[method])
    return replace(config, max_grad_norm=clip)


def score(config: RunConfig) -> float:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return run(config, Path(folder) / "run").score


def scores_of(groups: dict[Any, Iterable[RunConfig]], workers: ProcessPoolExecutor) -> dict[Any, list[float]]:
    """The score of each run, group by group; they run side by side."""
    flat = [(key, config) for key, configs in groups.items() for config in configs]
    found: dict[Any, list[float]] = {key: [] for key in groups}
    for (key, _), value in zip(flat, workers.map(score, [config for _, config in flat]), strict=True):
        found[key].append(value)
        print(".", end="", flush=True)
    print(flush=True)
    return found


def main(output: Path) -> None:
    cells = [(method, epsilon, clip) for method in METHODS for epsilon in EPSILONS for clip in CLIPS]

    def tuning(cell: tuple[str, float, float], by_clip: float) -> list[RunConfig]:
        config = replace(configured(*cell), lr=by_clip / cell[2], validation=VALIDATION)
        return [replace(config, seed=seed) for seed in TUNING_SEEDS]

    with ProcessPoolExecutor(2) as workers:
        tuned = scores_of({(c, lr): tuning(c, lr) for c in cells for lr in LRS_BY_CLIP}, workers)
        best = {c: max(LRS_BY_CLIP, key=lambda lr, c=c: statistics.mean(tuned[c, lr])) / c[2] for c in cells}
        plans = {c: [replace(configured(*c), lr=best[c], seed=seed) for seed in SEEDS] for c in cells}
        tested = scores_of(plans, workers)
    rows = [
        {
            "method": method,
            "epsilon": epsilon,
            "clip": clip,
            "lr": best[method, epsilon, clip],
            "tuning": {lr / clip: tuned[(method, epsilon, clip), lr] for lr in LRS_BY_CLIP},
            "scores": tested[method, epsilon, clip],
        }
        for method, epsilon, clip in cells
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
