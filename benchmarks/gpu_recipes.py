"""The recipe for texts on a leased GPU: what `lsg train --task text` gives when nothing is set, and what was tried.

    python benchmarks/gpu_recipes.py SST2 MINILM MPNET STORE SECONDS CELL... [--seeds 0,1,2] [--tiny]

A CELL is MODEL/RECORDS/EPSILON/TRIED, as minilm/all/3/auto: the automatic recipe with the settings of TRIED in place of
its own. Cells go to STORE in the order given, a line as each ends; none is started that would not end within SECONDS.
Start it again to go on. --tiny: every cell on a few sentences on the CPU, to see that all run. For results/:
`python -m lsg.reproduce.records STORE`.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_cells import Lease

from lsg.train.choose import choose_settings
from lsg.train.config import RunConfig
from lsg.train.listener import Listener

RECORDS = 67_349
SHARES = {"2k": 0.0297, "5k": 0.0742, "10k": 0.1485, "20k": 0.297, "all": 0.0}
AUTOMATIC = {"clipping": "automatic", "max_grad_norm": 1.0}
FLAT = {"clipping": "flat", "max_grad_norm": 0.1}
OWN_HEAD = {**FLAT, "pooling": "model", "head_scale": 0.1, "head_lr": 1.0}
MEAN = {**AUTOMATIC, "pooling": "mean", "head_lr": 10.0}
FINE_TUNED = {"trainable": "paper", "method": "rgp", "rank": 8, "lr": 1e-3, "epochs": 20}

WIDE = {"max_physical_batch_size": 640, "max_physical_tokens": 16_384}  # how it is computed alone

# What stands in place of the recipe's own settings.
TRIED: dict[str, dict[str, Any]] = {
    "auto": {},
    "own-head": {**FINE_TUNED, **OWN_HEAD},
    "own-head-automatic": {**FINE_TUNED, **OWN_HEAD, **AUTOMATIC},
    "mean": {**FINE_TUNED, **MEAN, "head_scale": 1.0},
    "mean-x3": {**FINE_TUNED, **MEAN, "head_scale": 3.0},
    "mean-head30": {**FINE_TUNED, **MEAN, "head_scale": 1.0, "head_lr": 30.0},
    "mean-slow": {**FINE_TUNED, **MEAN, "head_scale": 1.0, "lr": 5e-4, "head_lr": 20.0},
    "low-rate": {"lr": 3e-4, "head_lr": 30.0},
    "half-rate": {"lr": 5e-4, "head_lr": 20.0},
    "half-rate-10": {"lr": 5e-4, "head_lr": 20.0, "epochs": 10},
    "half-rate-10-wide": {"lr": 5e-4, "head_lr": 20.0, "epochs": 10, **WIDE},
    "low-rate-10-wide": {"lr": 3e-4, "head_lr": 30.0, "epochs": 10, **WIDE},
    "mean-averaged": {**FINE_TUNED, **MEAN, "head_scale": 1.0, "averaging": 0.1},
    "mean-rank16": {**FINE_TUNED, **MEAN, "head_scale": 1.0, "rank": 16},
    "mean-rank32": {**FINE_TUNED, **MEAN, "head_scale": 1.0, "rank": 32},
    "mean-long": {**FINE_TUNED, **MEAN, "head_scale": 1.0, "epochs": 40, "batch_size": 5200},
    "mean-x.1": {**FINE_TUNED, **MEAN, "head_scale": 0.1},
    "mean-x.03": {**FINE_TUNED, **MEAN, "head_scale": 0.03},
    "mean-x.1-flat": {**FINE_TUNED, **MEAN, **FLAT, "head_scale": 0.1},
    "mean-x.1-fast": {**FINE_TUNED, **MEAN, "head_scale": 0.1, "lr": 2e-3},
    "mean-x.1-long": {**FINE_TUNED, **MEAN, "head_scale": 0.1, "epochs": 40},
    "mean-x.1-lsg": {**FINE_TUNED, **MEAN, "head_scale": 0.1, "method": "lsg", "sparsity": 0.5},
    "head": {
        "trainable": "head",
        "pooling": "mean",
        "method": "dpsgd",
        **AUTOMATIC,
        "lr": 0.03,
        "head_lr": 1.0,
        "epochs": 40,
    },
}


def tiny(config: RunConfig) -> RunConfig:
    """The same, as small as it can be, with noise that need not be computed."""
    return replace(
        config, train_limit=0.001, epochs=1, batch_size=16, epsilon=None, noise_multiplier=1.0, accountant="rdp",
        delta=1e-3, device="cpu", max_physical_tokens=512,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("sst2", "minilm", "mpnet"):
        parser.add_argument(name)
    parser.add_argument("store", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("cells", nargs="+", help="MODEL/RECORDS/EPSILON/TRIED")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    lease = Lease(given.store, given.seconds, RECORDS)
    for seed in map(int, given.seeds.split(",")):
        for cell in given.cells:
            model, records, epsilon, tried = cell.split("/")
            fields = {
                "task": "text",
                "data": given.sst2,
                "model": getattr(given, model),
                "epsilon": float(epsilon),
                "train_limit": SHARES[records],
                "seed": seed,
                **TRIED[tried],
            }
            if tried == "head":  # all records at once, about: which ones are left is drawn
                fields["batch_size"] = int(0.97 * RECORDS * (SHARES[records] or 1))
            config = choose_settings(fields, cell, Listener())
            lease.run(f"{cell.replace('/', '_')}_{seed}", tiny(config) if given.tiny else config)


if __name__ == "__main__":
    main()
