"""What a run reports while it goes on: a progress bar or a log overrides the events that it shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsg.train.protected import Protected


@dataclass(frozen=True)
class RunStart:
    """What is known when training begins or goes on. steps, epochs: of the whole run.

    protected: whom the run protects; batch_size: how many of them a step has. steps_done, epochs_done, epsilon: where a
    resumed run stands; 0 for a new one. epsilon: None is infinite.
    """

    protected: Protected
    steps: int
    epochs: int
    steps_done: int
    epochs_done: int
    epsilon: float | None
    batch_size: int
    noise_multiplier: float
    noise_dimensions: int
    trained_parameters: int


class Listener:
    """Receives every event of a run and ignores it. Subclasses override the events that they show."""

    def note(self, text: str) -> None:
        """A line for the user about data, model or progress."""

    def warning(self, text: str) -> None:
        """Something is wrong with the run so far. Each is told once; those of the last epoch stand in the result."""

    def prepared(self, what: str, done: int, total: int) -> None:
        """So many texts are done with what is told in words, such as "tokenizing train"."""

    def started(self, start: RunStart) -> None:
        """Training begins or goes on."""

    def step(self, done: int) -> None:
        """So many logical steps with samples have been taken, from the start of the run."""

    def sample(self, epoch: int, text: str) -> None:
        """After an epoch a language model has written this. The text may be of any kind."""

    def epoch(self, row: dict[str, Any]) -> None:
        """An epoch is over; the row is its line of metrics.jsonl."""
