"""The accountant: counts steps, keeps them as phases, and says what ε they amount to."""

from collections.abc import Mapping
from typing import Any

from lsg.accounting.epsilon import checked_name, composed_epsilon
from lsg.accounting.phases import Phase, checked_delta, checked_history, checked_phase, composed
from lsg.errors import ConfigurationError


class Accountant:
    """What has been spent so far, and the ε it amounts to. Reads and steps as an Opacus accountant does.

    name: "prv" (as the paper), "pld" or "rdp".
    history: the phases so far, oldest first; `step` merges equal neighbours.
    """

    def __init__(self, name: str) -> None:
        self.name = checked_name(name)
        self.history: list[Phase] = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one step of the mechanism. Call it before the noisy result is released."""
        new = checked_phase(noise_multiplier, sample_rate, 1)
        if self.history and tuple(self.history[-1][:2]) == new[:2]:
            new = new._replace(steps=self.history.pop()[2] + 1)
        self.history.append(new)

    def get_epsilon(self, delta: float) -> float:
        """An upper bound of ε at `delta`: 0 before the first step, infinite if any step had no noise."""
        return composed_epsilon(self.name, composed(self.history), checked_delta("delta", delta))

    def epsilon_after(self, steps: Phase, delta: float) -> float:
        """What `get_epsilon` would say after these further steps."""
        return composed_epsilon(self.name, composed([*self.history, steps]), checked_delta("delta", delta))

    def mechanism(self) -> str:
        """The accountant's name, as Opacus spells it."""
        return self.name

    def __len__(self) -> int:
        return sum(steps for _, _, steps in self.history)

    def __repr__(self) -> str:
        return f"Accountant({self.name!r}, steps={len(self)})"

    def state_dict(self) -> dict[str, Any]:
        """Everything spent, as plain JSON values."""
        return {"mechanism": self.name, "history": [list(phase) for phase in self.history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the history by a saved one. A state of another mechanism, or a malformed one, changes nothing."""
        if not isinstance(state, Mapping) or not {"mechanism", "history"} <= state.keys():
            raise ConfigurationError(
                f"accountant state must be a mapping with 'mechanism' and 'history', not {state!r}: "
                "pass what Accountant.state_dict() returned"
            )
        if state["mechanism"] != self.name:
            raise ConfigurationError(
                f"accountant state has mechanism={state['mechanism']!r}, but this accountant is {self.name!r}: "
                f"make the engine with accountant={state['mechanism']!r} to continue that run"
            )
        self.history = checked_history(state["history"])


def create_accountant(name: str) -> Accountant:
    """A fresh accountant that has spent nothing. name: "prv", "pld" or "rdp"."""
    return Accountant(name)
