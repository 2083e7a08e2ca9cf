"""What was done, as accountants see it: phases of equal steps, checked.

Every function that takes a noise multiplier, a sample rate, a number of steps or a δ from a user checks it here.
"""

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lsg.errors import ConfigurationError

_MOST_KINDS = 256  # of steps, by noise and rate, before similar ones are counted as one kind
_ROUNDING = 1.005  # noise and rates are rounded by at most this factor


class Phase(NamedTuple):
    """Consecutive steps that share one noise multiplier and one sample rate. Equals the tuple that Opacus keeps."""

    noise_multiplier: float
    sample_rate: float
    steps: int


def composed(history: Sequence[tuple[float, float, int]]) -> tuple[Phase, ...]:
    """The history with equal phases added up and sorted: ε does not depend on the order, and caches find it again."""
    totals: dict[tuple[float, float], int] = {}
    for noise, rate, steps in checked_history(history):
        totals[noise, rate] = totals.get((noise, rate), 0) + steps
    return tuple(Phase(noise, rate, steps) for (noise, rate), steps in sorted(totals.items()) if steps)


def costliest_steps(phases: Iterable[Phase]) -> list[Phase]:
    """One step of each kind. Leaves out a kind if another has no more noise and no lower rate.

    The one left out costs no more: noise can be added, and records dropped from a sample, without looking at the data.
    """
    steps, highest = [], 0.0
    for noise, rate, _ in sorted(phases, key=lambda phase: (phase.noise_multiplier, -phase.sample_rate)):
        if rate > highest:
            steps.append(Phase(noise, rate, 1))
            highest = rate
    return steps


def fewer_kinds(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The phases, or where they are very many, fewer that cost no less: noise rounded down and rates rounded up."""
    if len(phases) <= _MOST_KINDS:
        return phases
    return composed([(_rounded(noise, -1), min(_rounded(rate, 1), 1.0), steps) for noise, rate, steps in phases])


def _rounded(value: float, direction: int) -> float:
    """The next power of `_ROUNDING` below (-1) or above (1)."""
    rung = math.floor(math.log(value) / math.log(_ROUNDING))
    while (_ROUNDING**rung - value) * direction < 0:
        rung += direction
    return _ROUNDING**rung


def checked_history(history: Iterable[Iterable[Any]]) -> list[Phase]:
    """The rows as phases; refuses what is not a list of them."""
    try:
        rows = [tuple(row) for row in history]
    except TypeError:
        rows = [()]
    if any(len(row) != 3 for row in rows):
        raise ConfigurationError(
            f"history={history!r} must be a list of (noise_multiplier, sample_rate, steps): "
            "pass what Accountant.state_dict() returned"
        )
    return [checked_phase(*row) for row in rows]


def checked_phase(noise_multiplier: float, sample_rate: float, steps: int) -> Phase:
    """The phase as Python's own numbers; refuses a value out of range by its name."""
    if not is_real(noise_multiplier) or not 0 <= noise_multiplier < math.inf:
        raise ConfigurationError(
            f"noise_multiplier={noise_multiplier!r} must be a finite number, 0 (no privacy) or above"
        )
    if not is_real(sample_rate) or not 0 < sample_rate <= 1:
        raise ConfigurationError(
            f"sample_rate={sample_rate!r} must be above 0 and at most 1: it is batch size / number of records"
        )
    if not _is_whole(steps) or steps < 0:
        raise ConfigurationError(f"steps={steps!r} must be a whole number, 0 or above")
    return Phase(float(noise_multiplier), float(sample_rate), int(steps))


def checked_delta(label: str, delta: float) -> float:
    """label: what the caller calls it."""
    if not is_real(delta) or not 0 < delta < 1:
        raise ConfigurationError(
            f"{label}={delta!r} must lie strictly between 0 and 1: choose it well below one over the number of records"
        )
    return float(delta)


def is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
