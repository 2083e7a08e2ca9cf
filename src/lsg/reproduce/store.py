"""The results store: a folder with one folder a cell, each the output of one training run.

A cell is a RunConfig; its folder's name is readable and stable, and a result counts only for the configuration that
made it. How it was computed (`HOW_COMPUTED`) may differ. A cell is complete once its `result.json` exists, which a run
writes last, or once the file of records beside the folder (`records.py`) has it.
"""

import contextlib
import math
import shutil
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError
from lsg.files.foreign_files import read_text
from lsg.files.foreign_values import json_value
from lsg.methods import METHODS
from lsg.reproduce.records import read_records, records_file
from lsg.train.config import RunConfig
from lsg.train.folder import RunFolder
from lsg.train.stored_settings import HOW_COMPUTED, computed_as, differences, stored_config


@dataclass(frozen=True)
class Outcome:
    """What a complete cell came to. score, curve (after each epoch): fractions. epsilon: infinite without privacy."""

    score: float
    curve: tuple[float, ...]
    epsilon: float
    seconds: float


@dataclass(frozen=True)
class Summary:
    """Several seeds of one configuration, in percent. std: of a sample, None for one seed. curve: mean an epoch."""

    seeds: int
    mean: float
    std: float | None
    curve: tuple[float, ...]


def cell_name(config: RunConfig) -> str:
    """Such as sst2-lsg-r8-p0.5-eps3.3-seed0: what the method depends on, not each setting of the task."""
    parts, options = [config.task, config.method], METHODS[config.method].options
    if "importance" in options and config.importance != "weight":
        parts.append(config.importance)
    if "rank" in options:
        parts.append(f"r{config.rank}")
    if "sparsity" in options:
        parts.append(f"p{config.sparsity:g}")
    if config.epsilon is not None:
        parts.append(f"eps{config.epsilon:g}")
    elif config.noise_multiplier is not None:
        parts.append(f"sigma{config.noise_multiplier:g}")
    return "-".join([*parts, f"seed{config.seed}"])


class Store:
    """The cells under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._published = read_records(records_file(folder))

    def path(self, config: RunConfig) -> Path:
        return self.folder / cell_name(config)

    def outcome(self, config: RunConfig) -> Outcome | None:
        """The result of a complete cell, None for one that is not. A result of other settings is refused."""
        name, file = cell_name(config), self.path(config) / "result.json"
        published = None if file.exists() else self._published.get(name)
        place = str(file) if published is None else f"{records_file(self.folder)}: {name}"
        if published is None and not file.exists():
            return None
        try:
            result = published or json_value(read_text(file))
            _check_same(place, stored_config(result["config"], place), config)
            epsilon = result["epsilon"]
            return Outcome(
                score=result["score"],
                curve=tuple(result["curve"]),
                epsilon=math.inf if epsilon is None else epsilon,
                seconds=result["seconds"],
            )
        except ConfigurationError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{place}: not a result of a run ({error!r}); remove this file to run the cell again"
            ) from None

    def train(self, config: RunConfig, run: Callable[..., Any], **options: Any) -> None:
        """Run a cell that is not complete: from its checkpoint where it was interrupted, else from the start.

        Of what is there, nothing is removed but the note on an earlier failure. A folder that holds something else
        than a run of this cell is refused by `run`.
        """
        path = self.path(config)
        (path / "error.txt").unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ConfigurationError):  # `run` itself refuses a file that cannot be read
            begun = RunFolder(path).begun()
            config = config if begun is None else computed_as(begun, config)
        run(config, path, resume=(path / "config.toml").is_file(), **options)

    def drop_model(self, config: RunConfig) -> None:
        """Remove a cell's trained weights: a grid is about its numbers, and hundreds of models fill a disk."""
        shutil.rmtree(self.path(config) / "model", ignore_errors=True)

    def summary(self, config: RunConfig, seeds: Iterable[int]) -> Summary | None:
        """Over those seeds that are complete; None if none is."""
        found = [self.outcome(replace(config, seed=seed)) for seed in seeds]
        outcomes = [outcome for outcome in found if outcome is not None]
        if not outcomes:
            return None
        scores = [100 * outcome.score for outcome in outcomes]
        return Summary(
            seeds=len(scores),
            mean=statistics.fmean(scores),
            std=statistics.stdev(scores) if len(scores) > 1 else None,
            curve=tuple(100 * statistics.fmean(at) for at in zip(*(o.curve for o in outcomes), strict=True)),
        )


def _check_same(place: str, stored: RunConfig, wanted: RunConfig) -> None:
    for key, (made, now) in differences(stored, wanted, besides=HOW_COMPUTED).items():
        raise ConfigurationError(
            f"{place}: made with {key} = {made}, now wanted with {now}; "
            "choose another --output, or remove that folder to run it again"
        )
