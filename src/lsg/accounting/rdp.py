"""Phases and δ in, ε out, by Rényi divergences: the loosest of the three accountants, the sturdiest and the fastest."""

import math
from functools import lru_cache

from lsg.accounting.libraries import NUMERICAL_FAILURES, dp_event, quiet
from lsg.accounting.phases import Phase


@lru_cache(maxsize=4096)
def rdp_epsilon(phases: tuple[Phase, ...], delta: float) -> float:
    """ε by dp-accounting's Rényi accountant: it goes to higher orders than Opacus's and its series always end."""
    with quiet():
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant

        orders = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024]
        accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        try:
            for phase in phases:
                accountant.compose(dp_event(phase), phase.steps)
            epsilon = float(accountant.get_epsilon(delta))
        except NUMERICAL_FAILURES:
            return math.inf
        # A divergence that rounds to zero or below makes the library answer 0. No order certifies less than this one
        # does without any divergence, so nothing below it is believed.
        floor = math.log1p(-1 / orders[-1]) - math.log(delta * orders[-1]) / (orders[-1] - 1)
        return max(epsilon, floor, 0.0) if not math.isnan(epsilon) else math.inf
