"""A workload: a task with a model, at a place of the paper's tables; a method in, the configuration of its run out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsg.methods import METHODS, Importance
from lsg.train.config import RunConfig
from lsg.train.presets import preset

TITLES = {"sst2": "SST-2", "qnli": "QNLI", "qqp": "QQP", "mnli": "MNLI", "cifar10": "CIFAR-10", "digits": "digits"}


@dataclass(frozen=True)
class Workload:
    """A task with a model, in the paper's place `stands_for` (a task's name; the task itself where it is that).

    epsilons: those of "accuracy against epsilon". epsilon: the one at which rank, sparsity and the mask are varied.
    rank, sparsity: where a study does not vary them.
    settings: where a run differs from the task's preset.
    tuned: for each method, what was tuned for it, in place of `settings` where both have it.
    """

    task: str
    model: str
    stands_for: str
    epsilons: tuple[float, ...]
    epsilon: float
    rank: int = 8
    sparsity: float = 0.5
    data: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    @property
    def title(self) -> str:
        """What was run, and what for."""
        folder = Path(self.model)
        # A run of lsg train leaves its model in a folder of that name.
        name = f"{folder.parent.name}/{folder.name}" if folder.name == "model" else folder.name
        ran = f"{TITLES[self.task]}, {name}"
        return ran if self.task == self.stands_for else f"{ran} (stand-in for {TITLES[self.stands_for]})"

    def config(
        self,
        method: str,
        *,
        epsilon: float | None = None,
        rank: int | None = None,
        sparsity: float | None = None,
        importance: Importance = "weight",
    ) -> RunConfig:
        """One cell. What a method does not have is set alike everywhere, so that equal cells are equal."""
        settings = {**preset(self.task, method), **self.settings, **self.tuned.get(method, {})}
        settings |= {"task": self.task, "data": self.data, "model": self.model}
        settings |= {"method": method, "importance": importance}
        options = METHODS[method].options
        settings["rank"] = rank or self.rank if "rank" in options else RunConfig.rank
        settings["sparsity"] = (self.sparsity if sparsity is None else sparsity) if "sparsity" in options else 0.0
        settings["epsilon"] = None if method == "non-private" else epsilon or self.epsilon
        return RunConfig(**settings)

    def at(self, rank: int | None, sparsity: float) -> RunConfig:
        """A place of table 1: rank None is "full"."""
        if rank is None:
            return self.config("sparse-dpsgd", sparsity=sparsity) if sparsity else self.config("dpsgd")
        return self.config("lsg", rank=rank, sparsity=sparsity) if sparsity else self.config("rgp", rank=rank)
