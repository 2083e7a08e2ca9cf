"""Signals of an epoch: those of its steps in, one by one, their means out. Not private, as those of a step."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lsg.step.signals import StepSignals


@dataclass(frozen=True)
class EpochSignals:
    """Means over an epoch's steps with samples; `StepSignals` says what each is. NOT private.

    clip_share: of all units of the epoch; None with automatic clipping.
    """

    clip_share: float | None
    signal_norm: float
    noise_norm: float
    update_norm: float


@dataclass(frozen=True)
class SignalSums:
    """What the steps of an epoch add up to so far. Tensors stay on the device: nothing waits before `read`."""

    steps: int = 0
    units: int = 0
    clipped: Tensor | float = 0.0
    signal_norm: Tensor | float = 0.0
    noise_norm: float = 0.0
    update_norm: Tensor | float = 0.0

    def plus(self, step: StepSignals | None) -> "SignalSums":
        """With one step more; None, of non-private training, adds nothing."""
        if step is None:
            return self
        return SignalSums(
            self.steps + 1,
            self.units + (step.units or 0),
            self.clipped + step.clipped,
            self.signal_norm + step.signal_norm.double(),
            self.noise_norm + step.noise_norm,
            self.update_norm + step.update_norm.double(),
        )

    def read(self) -> dict[str, Any]:
        """As plain numbers, which `SignalSums(**numbers)` goes on from."""
        return {key: value.item() if isinstance(value, Tensor) else value for key, value in vars(self).items()}

    def mean(self) -> EpochSignals | None:
        """None where there was no step, or none with privacy."""
        if not self.steps:
            return None
        return EpochSignals(
            clip_share=float(self.clipped) / self.units if self.units else None,
            signal_norm=float(self.signal_norm) / self.steps,
            noise_norm=self.noise_norm / self.steps,
            update_norm=float(self.update_norm) / self.steps,
        )
