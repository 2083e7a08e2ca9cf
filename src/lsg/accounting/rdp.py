"""Phases and δ in, ε out, by Rényi divergences: the loosest of the three accountants, the sturdiest and the fastest."""

import math
from functools import lru_cache

from lsg.accounting.libraries import NUMERICAL_FAILURES, dp_event, quiet
from lsg.accounting.phases import Phase

ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024)
Curve = tuple[float, ...]  # the Rényi divergence at each of ORDERS


@lru_cache(maxsize=4096)
def rdp_epsilon(phases: tuple[Phase, ...], delta: float) -> float:
    """ε by dp-accounting's Rényi accountant: it goes to higher orders than Opacus's and its series always end."""
    try:
        return curve_epsilon(rdp_curve(phases), delta)
    except NUMERICAL_FAILURES:
        return math.inf


@lru_cache(maxsize=1024)
def rdp_curve(phases: tuple[Phase, ...]) -> Curve:
    """The divergences between the outputs of all phases on neighbouring data."""
    with quiet():
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant

        accountant = RdpAccountant(list(ORDERS), dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        for phase in phases:
            accountant.compose(dp_event(phase), phase.steps)
        return tuple(map(float, accountant.rdp))


def curve_epsilon(curve: Curve, delta: float) -> float:
    """The ε at δ that the divergences certify; infinite where they are not numbers."""
    with quiet():
        from dp_accounting.rdp import compute_epsilon

        epsilon = float(compute_epsilon(ORDERS, curve, delta)[0])
    # A divergence that rounds to zero or below makes the library answer 0. No order certifies less than the last one
    # does without any divergence, so nothing below it is believed.
    floor = math.log1p(-1 / ORDERS[-1]) - math.log(delta * ORDERS[-1]) / (ORDERS[-1] - 1)
    return max(epsilon, floor, 0.0) if not math.isnan(epsilon) else math.inf
