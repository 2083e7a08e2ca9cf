"""How much of the paper's evaluation to run: its exact settings, an hour of one GPU, or minutes of two CPU cores.

A scale names, for each place of the paper's tables and figures, the workload that is run there. Where that is not the
paper's own task, it is a stand-in, and every table and figure says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lsg.errors import ConfigurationError
from lsg.reproduce.workload import Workload
from lsg.tasks.catalog import TASKS

SST2_EPSILONS, QQP_EPSILONS, CIFAR_EPSILONS = (1.2, 1.6, 3.3, 6.5), (0.9, 1.7, 3.4, 6.7), (0.8, 1.7, 3.3, 6.8)


@dataclass(frozen=True)
class Scale:
    """table1, epsilon, image, negatives, weights: the workloads of the studies; `image` is table 2's and the curves'.

    weights_trained: figure-weights takes the model after non-private training: one from scratch has learnt nothing yet.
    threads: for torch on a CPU; None leaves it its own choice.
    """

    name: str
    about: str
    seeds: int
    table1: tuple[Workload, ...]
    ranks: tuple[int | None, ...]
    sparsities: tuple[float, ...]
    image: Workload
    curve_ranks: tuple[int, ...]
    curve_sparsities: tuple[float, ...]
    epsilon: tuple[Workload, ...]
    negatives: Workload
    weights: Workload
    weights_trained: bool = False
    threads: int | None = None

    def using(self, data: Mapping[str, str], model: Mapping[str, str]) -> "Scale":
        """With other data and models: keys are tasks, or "text" and "image" for all tasks of a kind."""

        def change(workload: Workload) -> Workload:
            keys = (TASKS[workload.task].kind, workload.task)
            for key in keys:
                workload = replace(workload, data=data.get(key, workload.data), model=model.get(key, workload.model))
            return workload

        tasks = {workload.task for workload in (*self.table1, *self.epsilon, self.image, self.negatives, self.weights)}
        known = {*tasks, *(TASKS[task].kind for task in tasks)}
        for option, given in (("--data", data), ("--model", model)):
            for key in given.keys() - known:
                raise ConfigurationError(
                    f"{option} {key}={given[key]}: scale '{self.name}' has {', '.join(sorted(known))}"
                )
        return replace(
            self,
            table1=tuple(map(change, self.table1)),
            epsilon=tuple(map(change, self.epsilon)),
            image=change(self.image),
            negatives=change(self.negatives),
            weights=change(self.weights),
        )


def _paper() -> Scale:
    sst2 = Workload("sst2", "roberta-base", "sst2", SST2_EPSILONS, 3.3)
    qqp = replace(sst2, task="qqp", stands_for="qqp", epsilons=QQP_EPSILONS, epsilon=3.4)
    qnli = replace(sst2, task="qnli", stands_for="qnli")
    mnli = replace(qqp, task="mnli", stands_for="mnli")
    cifar10 = Workload("cifar10", "wrn28-4", "cifar10", CIFAR_EPSILONS, 3.3, rank=16, sparsity=0.3)
    return Scale(
        name="paper",
        about="the paper's own tasks, models and settings",
        seeds=5,
        table1=(sst2, qqp),
        ranks=(2, 4, 8, None),
        sparsities=(0.0, 0.1, 0.3, 0.5),
        image=cifar10,
        curve_ranks=(2, 4, 8, 16),
        curve_sparsities=(0.0, 0.1, 0.3, 0.5),
        epsilon=(sst2, qnli, qqp, mnli),
        negatives=sst2,
        weights=sst2,
    )


# What benchmarks/gpu_sst2.py found for all-mpnet-base-v2 (results/reproduce/gpu-hour/tuned.json).
_TUNED_SST2: dict[str, dict[str, Any]] = {
    "lsg": {"lr": 1e-3, "max_grad_norm": 1.0},
    "rgp": {"lr": 1e-3, "max_grad_norm": 0.1},
    "sparse-dpsgd": {"lr": 1e-3, "max_grad_norm": 1.0},
    "dpsgd": {"lr": 3e-4, "max_grad_norm": 1.0},
    "non-private": {"lr": 1e-4},
}


def _gpu_hour() -> Scale:
    fast = {"precision": "bf16"}
    large = {**fast, "max_physical_batch_size": 1024}  # full-rank methods have no matrices for each sample on a GPU
    sst2 = Workload("sst2", "roberta-base", "sst2", (1.2, 3.3), 3.3, settings=large, tuned=_TUNED_SST2)
    cifar10 = Workload("cifar10", "wrn28-2", "cifar10", (3.3,), 3.3, rank=16, sparsity=0.3, settings=fast)
    return Scale(
        name="gpu-hour",
        about="a part of the paper's grid with its settings, but for SST-2's learning rates and clips, tuned "
        "for all-mpnet-base-v2 in short runs; about an hour of one H200",
        seeds=1,
        table1=(sst2,),
        ranks=(2, 8, None),
        sparsities=(0.0, 0.5),
        image=cifar10,
        curve_ranks=(16,),
        curve_sparsities=(0.0, 0.3),
        epsilon=(sst2,),
        negatives=sst2,
        weights=sst2,
    )


def _cpu_minutes() -> Scale:
    # Half of the preset's epochs, and the micro-batch that is fastest on one thread.
    short = {"epochs": 20, "max_physical_batch_size": 128}
    digits = Workload("digits", "small-cnn", "cifar10", CIFAR_EPSILONS, 3.3, settings=short)
    for_text = replace(digits, stands_for="sst2")
    return Scale(
        name="cpu-minutes",
        about="every table and figure from scikit-learn's 1,797 real digits and a small CNN trained from scratch, in "
        "place of the paper's tasks. It shows that everything works, not the paper's numbers; with 360 test images, "
        "differences of a point or two mean little",
        seeds=2,
        table1=(for_text,),
        ranks=(2, 4, 8, None),
        sparsities=(0.0, 0.1, 0.3, 0.5),
        image=digits,
        curve_ranks=(2, 4, 8),
        curve_sparsities=(0.0, 0.1, 0.3, 0.5),
        epsilon=(for_text,),
        negatives=for_text,
        weights=for_text,
        weights_trained=True,
        threads=1,  # a model this small gains little from more, and on busy cores they spend their time waiting
    )


SCALES = {"paper": _paper, "gpu-hour": _gpu_hour, "cpu-minutes": _cpu_minutes}


def scale(name: str) -> Scale:
    """A scale by its name."""
    if name not in SCALES:
        raise ConfigurationError(f"--scale '{name}' must be one of {', '.join(SCALES)}")
    return SCALES[name]()
