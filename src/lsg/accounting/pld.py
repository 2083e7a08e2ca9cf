"""Phases and δ in, ε out, by privacy loss distributions."""

import math

from lsg.accounting.libraries import dp_event, quiet
from lsg.accounting.phases import Phase

_LARGEST_GRID = 2**18  # points of one step's distribution: a slower Python loop than PRV's grid, about a second of work


def pld_epsilon(phases: tuple[Phase, ...], delta: float, round_off: float, loose: float) -> float:
    """ε by dp-accounting's privacy loss distributions, pessimistically discretised, the worse of add and remove."""
    with quiet():
        import dp_accounting
        from dp_accounting.pld import PLDAccountant

        # The library's 1e-4, finer where many steps share a small ε, coarser where large losses would take minutes.
        # Below 1e-5 its differences of δ lose their digits.
        total = sum(phase.steps for phase in phases)
        widest = max(10 / phase.noise_multiplier + 0.5 / phase.noise_multiplier**2 for phase in phases)
        fine = min(1e-4, loose / (10 * math.sqrt(total)))
        interval = max(fine, 1e-5, 1e-5 * loose, widest / _LARGEST_GRID)
        accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, interval)
        for phase in phases:
            accountant.compose(dp_event(phase), phase.steps)
        # The δ asked for is a thousandth smaller as well: a single step comes out exact to the last digit or below it.
        return float(accountant.get_epsilon(delta * 0.999 - round_off))
