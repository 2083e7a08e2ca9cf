"""Runs that differ only by their seed are one setting: runs in, settings with mean and deviation out."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lsg.files.foreign_text import as_key
from lsg.methods import METHODS
from lsg.report.runs import StoredRun
from lsg.tasks.measures import Measure, measure_of

BUDGET = ("epsilon", "noise_multiplier")
_OPTIONS = ("rank", "sparsity", "importance")
_IN_METHOD = ("method", *_OPTIONS)
# What a method does not use: two runs that differ in it alone are the same experiment.
_UNUSED = {name: tuple(key for key in _OPTIONS if key not in known.options) for name, known in METHODS.items()}
_UNUSED["non-private"] += ("delta", "accountant", "clipping", "max_grad_norm")


@dataclass(frozen=True)
class Setting:
    """One or more runs of the same configuration but for the seed; all complete, or all incomplete."""

    config: dict[str, Any]  # without the seed and what the method does not use
    runs: tuple[StoredRun, ...]
    label: str  # tells it from the other settings of its section
    line: str  # the same without the budget: settings along one line of accuracy against ε

    @property
    def complete(self) -> bool:
        return self.runs[0].complete

    @property
    def scores(self) -> list[float]:
        return [run.score for run in self.runs if run.score is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def std(self) -> float | None:
        """Of a sample; None for fewer than two runs."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def epsilon(self) -> float | None:
        """The largest spent by any of its runs; None is infinite."""
        spent = [run.epsilon for run in self.runs if run.epsilon is not None]
        return max(spent) if len(spent) == len(self.runs) else None


@dataclass(frozen=True)
class Section:
    """One task with one model: scores of different ones are not to be compared."""

    task: str
    model: str
    settings: tuple[Setting, ...]

    @property
    def measure(self) -> Measure:
        """What the scores of its runs are."""
        return measure_of(self.task)

    @property
    def title(self) -> str:
        return f"{self.task} · {short_model(self.model)}"


def short_model(model: str) -> str:
    """The last part of a path or hub id."""
    return model.rstrip("/").rpartition("/")[2]


def as_text(value: Any) -> str:
    """A value of a configuration, briefly."""
    return "unknown" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def make_sections(runs: Sequence[StoredRun]) -> list[Section]:
    """In the order in which they first appear."""
    sections: dict[tuple[str, str], list[StoredRun]] = defaultdict(list)
    for run in runs:
        sections[as_text(run.config.get("task")), as_text(run.config.get("model"))].append(run)
    return [Section(task, model, _settings(members)) for (task, model), members in sections.items()]


def method_text(config: dict[str, Any]) -> str:
    """Such as "lsg r=8 p=0.5"."""
    used = used_config(config)
    parts = [as_text(config.get("method"))]
    parts += [f"r={as_text(used['rank'])}"] if "rank" in used else []
    parts += [f"p={as_text(used['sparsity'])}"] if "sparsity" in used else []
    parts += [as_text(used["importance"])] if used.get("importance", "weight") != "weight" else []
    return " ".join(parts)


def used_config(config: dict[str, Any]) -> dict[str, Any]:
    """Without the seed and without what the method does not use."""
    unused = _UNUSED.get(as_text(config.get("method")), ())
    return {key: value for key, value in config.items() if key != "seed" and key not in unused}


def varying(configs: Sequence[dict[str, Any]]) -> list[str]:
    """The keys whose values are not the same everywhere, missing ones aside."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({_frozen(config[key]) for config in configs if key in config}) > 1]


def _settings(runs: list[StoredRun]) -> tuple[Setting, ...]:
    groups: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        groups[_frozen([run.complete, used_config(run.config)])].append(run)
    ordered = sorted(groups.values(), key=lambda members: _order(members[0].config))
    configs = [used_config(members[0].config) for members in ordered]
    differing = [key for key in varying(configs) if key not in _IN_METHOD]
    return tuple(
        Setting(
            config,
            tuple(members),
            label=_label(config, differing, members[0].complete),
            line=_label(config, [key for key in differing if key not in BUDGET], members[0].complete),
        )
        for config, members in zip(configs, ordered, strict=True)
    )


def _order(config: dict[str, Any]) -> tuple[float, ...]:
    """By method, then rank, sparsity and budget; what is not a number comes first."""
    method = config.get("method")
    place = list(METHODS).index(method) if method in METHODS else len(METHODS)
    numbers = (config.get(key) for key in ("rank", "sparsity", *BUDGET))
    return (place, *(value if isinstance(value, int | float) else -1 for value in numbers))


def _label(config: dict[str, Any], differing: list[str], complete: bool) -> str:
    names = {"epsilon": "ε", "noise_multiplier": "noise"}
    extra = [f"{names.get(key, key)}={as_text(config[key])}" for key in differing if key in config]
    return ", ".join([method_text(config), *extra]) + ("" if complete else " (incomplete)")


def _frozen(value: Any) -> str:
    """A text that is equal exactly for equal values; a file may say 1 and another 1.0."""
    return as_key(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
