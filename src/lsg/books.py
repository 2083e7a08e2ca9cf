"""The books of a run: each logical step in, before its noise is drawn, and counted as the sampling plan says."""

from typing import Any

from lsg.accounting import Accountant
from lsg.sampling import SamplingPlan


class Books:
    """Counts each logical step."""

    def __init__(self, accountant: Accountant, plan: SamplingPlan) -> None:
        self.accountant, self._plan = accountant, plan
        self._counted: tuple[int, float] | None = None  # the epoch and noise that a full-rate step stands for

    def count(self, noise_multiplier: float, epoch: int | None) -> None:
        """One step of this epoch of the loader; None where the batch did not come from it."""
        rate = 1.0  # nothing is known of how a batch from elsewhere was drawn: no amplification
        if epoch is not None and self._plan.poisson:
            rate = self._plan.sample_rate
        elif epoch is not None:
            # Without Poisson sampling a record enters one step of an epoch, unamplified: the epoch's first step counts
            # for all of them. A step with other noise counts for itself.
            if self._counted == (epoch, noise_multiplier):
                return
            self._counted = (epoch, noise_multiplier)
        self.accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)

    def state_dict(self) -> dict[str, Any]:
        """Everything spent, and what the epoch under way has been counted for."""
        return {"accountant": self.accountant.state_dict(), "counted": self._counted and list(self._counted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accountant.load_state_dict(state["accountant"])
        self._counted = state["counted"] and tuple(state["counted"])
