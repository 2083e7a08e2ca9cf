"""Sparsity schedules: step -> the share of the full sparsity in force at that step (0 = dense factors, 1 = all of it).

The paper trains with constant sparsity and names "switching on sparsification in the later stages" as future work
(section 4.3); the other two schedules are that idea.
"""

from dataclasses import dataclass
from typing import Protocol

from lsg.errors import ConfigurationError


class Schedule(Protocol):
    """Anything that maps a logical step, counted from 0, to a share in [0, 1]."""

    def share(self, step: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The paper's schedule: full sparsity from the first step on."""

    def share(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class SwitchOn:
    """No sparsity before `step`, full sparsity from it on."""

    step: int

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ConfigurationError(f"SwitchOn(step={self.step}): step must be 0 or more")

    def share(self, step: int) -> float:
        return 1.0 if step >= self.step else 0.0


@dataclass(frozen=True)
class Ramp:
    """No sparsity up to `start`, then linearly more until it is full at `stop`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigurationError(f"Ramp(start={self.start}, stop={self.stop}): needs 0 <= start < stop")

    def share(self, step: int) -> float:
        return min(1.0, max(0.0, (step - self.start) / (self.stop - self.start)))
