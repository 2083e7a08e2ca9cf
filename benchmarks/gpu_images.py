"""Images from scratch on a leased GPU: recipes for CIFAR-10 and Fashion-MNIST, the most wanted first.

    python benchmarks/gpu_images.py CIFAR10 FASHION STORE SECONDS [--only NAMES] [--seeds 0,1,2] [--tiny]

Cells go to STORE in the order below, one line as each ends; none is started that would not end within SECONDS at the
pace of like ones. Start it again to go on: complete cells are skipped. --only: cells of these names (with *), in this
order. --tiny: every cell on a hundred images for one epoch on the CPU, to see that all of them run.
"""

import argparse
import fnmatch
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_cells import Lease

from lsg.train.config import RunConfig

RECORDS = {"cifar10": 50_000, "fashion-mnist": 60_000}
COMMON: dict[str, Any] = {"delta": 1e-5, "optimizer": "sgd", "trainable": "all", "max_physical_batch_size": 2048}
# Tramèr and Boneh 2021, their README: batches of 8192, clip 0.1, constant rate, momentum 0.9. Group norm for all.
SCATTER = {**COMMON, "method": "dpsgd", "max_grad_norm": 0.1, "lr_schedule": "constant", "batch_size": 8192}
# De et al. 2022: batches of 4096, clip 1, constant rate, no momentum, 16 views. Their steps need an hour; these do not.
DE = {
    **COMMON,
    "method": "dpsgd",
    "max_grad_norm": 1.0,
    "lr_schedule": "constant",
    "momentum": 0.0,
    "batch_size": 4096,
    "max_physical_batch_size": 512,
}
FASHION = {"task": "fashion-mnist", "epsilon": 3.0}
CIFAR3, CIFAR8 = ({"task": "cifar10", "epsilon": epsilon} for epsilon in (3.3, 8.0))
LOW_RANK = {"method": "rgp", "rank": 16}

CELLS: dict[str, dict[str, Any]] = {
    # The bars, each by the cheapest recipe that should pass it.
    "fashion-3/scatter-linear": {**SCATTER, **FASHION, "model": "scatter-linear", "lr": 16.0, "epochs": 40},
    "cifar-3.3/scatter-cnn": {**SCATTER, **CIFAR3, "model": "scatter-cnn", "lr": 4.0, "epochs": 60},
    "cifar-8/scatter-cnn-views4": {**SCATTER, **CIFAR8, "model": "scatter-cnn", "lr": 4.0, "epochs": 100, "views": 4},
    "cifar-3.3/scatter-cnn-views4": {**SCATTER, **CIFAR3, "model": "scatter-cnn", "lr": 4.0, "epochs": 60, "views": 4},
    "cifar-8/scatter-resnet-views4": {**DE, **CIFAR8, "model": "scatter-resnet", "lr": 4.0, "epochs": 60, "views": 4},
    "cifar-3.3/scatter-resnet-views4": {
        **DE,
        **CIFAR3,
        "model": "scatter-resnet",
        "lr": 2.0,
        "epochs": 40,
        "views": 4,
    },
    "cifar-8/wrn16-4-views4": {**DE, **CIFAR8, "model": "wrn16-4", "lr": 4.0, "epochs": 60, "views": 4},
    "cifar-3.3/wrn16-4-views4": {**DE, **CIFAR3, "model": "wrn16-4", "lr": 2.0, "epochs": 40, "views": 4},
    # One change at a time.
    "cifar-3.3/scatter-linear": {**SCATTER, **CIFAR3, "model": "scatter-linear", "lr": 4.0, "epochs": 60},
    "cifar-3.3/scatter-cnn-linear-rate": {
        **SCATTER,
        **CIFAR3,
        "model": "scatter-cnn",
        "lr": 8.0,
        "epochs": 60,
        "lr_schedule": "linear",
    },
    "cifar-3.3/scatter-cnn-automatic": {
        **SCATTER,
        **CIFAR3,
        "model": "scatter-cnn",
        "lr": 0.4,
        "epochs": 60,
        "clipping": "automatic",
        "max_grad_norm": 1.0,
    },
    "cifar-3.3/scatter-cnn-views16": {
        **SCATTER,
        **CIFAR3,
        "model": "scatter-cnn",
        "lr": 4.0,
        "epochs": 60,
        "views": 16,
    },
    "cifar-8/scatter-cnn": {**SCATTER, **CIFAR8, "model": "scatter-cnn", "lr": 4.0, "epochs": 100},
    "fashion-3/scatter-cnn": {**SCATTER, **FASHION, "model": "scatter-cnn", "lr": 4.0, "epochs": 40},
    "fashion-3/scatter-linear-views4": {
        **SCATTER,
        **FASHION,
        "model": "scatter-linear",
        "lr": 16.0,
        "epochs": 40,
        "views": 4,
    },
    "cifar-8/wrn16-2-views4": {**DE, **CIFAR8, "model": "wrn16-2", "lr": 4.0, "epochs": 60, "views": 4},
    "cifar-8/wrn16-4-views1": {**DE, **CIFAR8, "model": "wrn16-4", "lr": 4.0, "epochs": 60},
    # The same in low rank, with and without masks.
    "cifar-3.3/scatter-cnn-rgp": {**SCATTER, **CIFAR3, **LOW_RANK, "model": "scatter-cnn", "lr": 4.0, "epochs": 60},
    "cifar-3.3/scatter-cnn-lsg": {
        **SCATTER,
        **CIFAR3,
        "method": "lsg",
        "rank": 16,
        "sparsity": 0.3,
        "model": "scatter-cnn",
        "lr": 4.0,
        "epochs": 60,
    },
    "cifar-8/wrn16-4-views4-rgp": {
        **DE,
        **CIFAR8,
        **LOW_RANK,
        "model": "wrn16-4",
        "lr": 4.0,
        "epochs": 60,
        "views": 4,
    },
    # The published recipe in full: about an hour.
    "cifar-8/wrn16-4-views16": {**DE, **CIFAR8, "model": "wrn16-4", "lr": 4.0, "epochs": 200, "views": 16},
}


def tiny(config: RunConfig) -> RunConfig:
    """The same, as small as it can be: scored on a few of the training images, with noise that need not be computed."""
    return replace(
        config,
        train_limit=0.002,
        validation=0.001,
        epochs=1,
        batch_size=32,
        max_physical_batch_size=16,
        views=min(config.views, 2),
        epsilon=None,
        noise_multiplier=1.0,
        accountant="rdp",
        delta=1e-3,
        device="cpu",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar10")
    parser.add_argument("fashion")
    parser.add_argument("store", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--only", default="*", help="comma-separated")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    data = {"cifar10": given.cifar10, "fashion-mnist": given.fashion}
    leases = {task: Lease(given.store, given.seconds, records) for task, records in RECORDS.items()}
    names = [name for pattern in given.only.split(",") for name in fnmatch.filter(CELLS, pattern)]
    for seed in map(int, given.seeds.split(",")):
        for name in dict.fromkeys(names):
            fields = CELLS[name]
            config = RunConfig(**fields, data=data[fields["task"]], seed=seed)
            leases[config.task].run(f"{name}-{seed}", tiny(config) if given.tiny else config)


if __name__ == "__main__":
    main()
