"""Who watches a run: a progress bar or a log overrides what it wants to hear."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunPlan:
    """What is settled before the first step. steps: of the whole run.

    steps_done, epochs_done, epsilon: where a resumed run stands; 0 for a new one. epsilon: None is infinite.
    """

    records: int
    steps: int
    steps_done: int
    epochs_done: int
    epsilon: float | None
    batch_size: int
    noise_multiplier: float
    noise_dimensions: int
    trained_parameters: int


class Listener:
    """Hears all and does nothing."""

    def note(self, text: str) -> None:
        """One line about what goes on before, or beside, training."""

    def tokenized(self, part: str, done: int, total: int) -> None:
        """So many texts of a part of the data are encoded."""

    def started(self, plan: RunPlan) -> None:
        """Training begins or goes on."""

    def step(self, done: int) -> None:
        """So many logical steps with samples have been taken, from the start of the run."""

    def epoch(self, row: dict[str, Any]) -> None:
        """An epoch is over; the row is its line of metrics.jsonl."""
