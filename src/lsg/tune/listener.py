"""What a search reports while it goes on, and what came of it."""

from dataclasses import dataclass
from typing import Any

from lsg.tasks.measures import Measure
from lsg.train.listener import Listener


class SearchListener(Listener):
    """Receives the events of every run, and which run they are of."""

    def begins(self, number: int, runs: int, settings: str) -> None:
        """Run `number` of `runs`."""

    def ended(self, number: int, score: float, measure: Measure) -> None:
        """score: as it is chosen by; measure: what it is."""


@dataclass(frozen=True)
class Outcome:
    """best: which run won, from 1. scores: what was chosen by, run by run. tried: the settings of each, in words.
    measure: the name of what was chosen by."""

    best: int
    scores: list[float]
    tried: list[str]
    settings: dict[str, Any]
    cost: str
    statement: str | None = None
    measure: str = "accuracy"
