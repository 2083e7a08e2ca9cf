"""What a search is, and what was drawn for it: two frozen records that can be written to a file and read back."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from lsg.accounting.selection import Repeats
from lsg.errors import ConfigurationError
from lsg.train.config import RunConfig
from lsg.train.stored_settings import stored_config

SCORED_SHARE = 0.1  # of the records that a search runs on, where --validation does not say


@dataclass(frozen=True)
class Search:
    """base: what `lsg train` would use, with an ε. varied: name of a setting -> the values to try.

    runs: on average where the search is paid for, else at most. draw: how their number is drawn, see
        lsg.accounting.selection.
    public_data: search on these data. held_out: search on this share of the private data, which is then never trained
        on. Neither: search on the private data and pay for it.
    shrink: search with batches so many times smaller, the same noise-to-batch ratio and number of steps.
    """

    base: RunConfig
    varied: dict[str, list[Any]]
    runs: int = 5
    draw: str = "poisson"
    public_data: str | None = None
    held_out: float | None = None
    shrink: int = 1

    def __post_init__(self) -> None:
        if self.base.epsilon is None:
            raise ConfigurationError("lsg tune needs --epsilon: the budget that the settings are for")
        if self.base.unit_column is not None:
            raise ConfigurationError(
                "--unit-column: lsg tune counts records, for the noise of its runs and of scores, and would protect "
                "persons too little. Search on public data without it, and train with it"
            )
        several = {"generate": "change a perplexity by any amount", "tokens": "have any number of words"}
        if self.is_paid and self.base.kind in several:
            raise ConfigurationError(
                f"--task {self.base.task}: lsg tune pays for a choice by noise on a count of right answers, one a "
                f"record, and one text can {several[self.base.kind]}. Search with --public-data or --held-out"
            )
        if self.base.tuning_part:
            raise ConfigurationError("--tuning-part is for lsg train: here it is --held-out")
        if self.public_data is not None and self.held_out is not None:
            raise ConfigurationError("--public-data or --held-out, not both: the search runs on one of them")
        if self.public_data is not None and self.base.data is not None and _same(self.public_data, self.base.data):
            raise ConfigurationError(
                f"--public-data {self.public_data} is --data itself: a search on it would not be free. Leave out "
                "--public-data to pay for the search, or give other data"
            )
        if self.held_out is not None and not 0 < self.held_out < 1:
            raise ConfigurationError(f"--held-out {self.held_out:g} must be a share between 0 and 1")
        if self.runs < 1:
            raise ConfigurationError(f"--runs {self.runs} must be at least 1")
        if self.shrink < 1:
            raise ConfigurationError(f"--shrink {self.shrink} must be at least 1")
        if self.is_paid and self.shrink > 1:
            raise ConfigurationError(
                "--shrink: a paid search releases the model of its best run, so its runs are full ones. Use --shrink "
                "with --public-data or --held-out"
            )
        Repeats(self.draw, self.runs)  # refuses what cannot be drawn

    @property
    def is_paid(self) -> bool:
        return self.public_data is None and self.held_out is None

    @property
    def repeats(self) -> Repeats:
        return Repeats(self.draw, self.runs)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "base": self.base.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> "Search":
        return cls(**{**values, "base": stored_config(values["base"], source)})


@dataclass(frozen=True)
class Plan:
    """What a search does, drawn before its first run and never again: a crash must not change how it was drawn.

    runs: what is trained. settings: of each run, what `lsg train` would be given if it wins.
    epsilon: of the whole search where it is paid for, at the base's δ; one_run_epsilon: of the costliest run alone.
    score_noise: deviation of the noise on the number of right answers, 0 where it is not private. records, scored: how
        many records a paid search trains and scores on; its noise follows from them.
    """

    runs: tuple[RunConfig, ...]
    settings: tuple[dict[str, Any], ...]
    epsilon: float | None = None
    one_run_epsilon: float | None = None
    candidates: int = 0
    score_noise: float = 0.0
    records: int = 0
    scored: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "runs": [config.to_dict() for config in self.runs], "settings": list(self.settings)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> "Plan":
        runs = tuple(stored_config(run, source) for run in values["runs"])
        return cls(**{**values, "runs": runs, "settings": tuple(values["settings"])})


def _same(one: str, other: str) -> bool:
    """Whether two sources of data, paths or names on the hub, are one."""
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def release_settings(config: RunConfig, **changes: Any) -> dict[str, Any]:
    """A run's settings as tuned.toml holds them: without the seed, which is secret."""
    changed = dataclasses.replace(config, **changes).to_dict()
    return {key: value for key, value in changed.items() if key != "seed"}
