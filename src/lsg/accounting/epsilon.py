"""(noise multiplier, sample rate, steps) in, ε at a given δ out.

Neighbouring data sets differ by one added or removed record, batches are Poisson samples, and each step is a Gaussian
mechanism of sensitivity 1. Every ε returned is an upper bound: where a method's numerics cannot be trusted the next,
looser and sturdier one answers (PRV, then PLD, then RDP).
"""

import contextlib
import math
from functools import lru_cache

from lsg.accounting.libraries import NUMERICAL_FAILURES
from lsg.accounting.phases import Phase, checked_delta, checked_phase, composed, fewer_kinds
from lsg.accounting.pld import pld_epsilon
from lsg.accounting.prv import prv_epsilon
from lsg.accounting.rdp import rdp_epsilon
from lsg.errors import ConfigurationError

ACCOUNTANTS = ("prv", "pld", "rdp")

# Composition by FFT leaves an error in δ that grows with the number of steps: 1e-16 a step was the most measured (PRV
# and PLD, 1 to 1e6 steps, in tails whose true mass is known to vanish). Ten times that is taken off δ to be safe.
_ROUND_OFF_PER_STEP = 1e-15
# Past this ε nobody needs a tight value, while the FFT's grids grow without bound: RDP answers alone.
_LARGEST_FFT_EPSILON = 1000.0
# Past this many steps the FFTs take minutes and their round-off counts: RDP answers alone there too.
_LARGEST_FFT_STEPS = 3_000_000


def epsilon_of(*, accountant: str, noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """An upper bound of the ε that `steps` equal steps spend at `delta`. Zero steps spend nothing."""
    name, delta = checked_name(accountant), checked_delta("delta", delta)
    return composed_epsilon(name, composed([checked_phase(noise_multiplier, sample_rate, steps)]), delta)


def checked_name(name: str) -> str:
    """The name of an accountant; refuses any other."""
    if name not in ACCOUNTANTS:
        raise ConfigurationError(f"accountant={name!r} is not known: use one of {', '.join(map(repr, ACCOUNTANTS))}")
    return name


@lru_cache(maxsize=4096)
def composed_epsilon(name: str, phases: tuple[Phase, ...], delta: float) -> float:
    """ε by the named method, or by the next sturdier one where its numerics fail. Never below the truth."""
    if not phases:
        return 0.0
    if any(phase.noise_multiplier == 0 for phase in phases):
        return math.inf
    loose = rdp_epsilon(phases, delta)
    steps = sum(phase.steps for phase in phases)
    round_off = _ROUND_OFF_PER_STEP * (steps + 100)
    beyond_fft = loose > _LARGEST_FFT_EPSILON or steps > _LARGEST_FFT_STEPS or round_off > delta / 2
    if name == "rdp" or loose == 0 or beyond_fft:
        return loose
    for method in (prv_epsilon, pld_epsilon) if name == "prv" else (pld_epsilon,):
        with contextlib.suppress(*NUMERICAL_FAILURES):
            epsilon = method(fewer_kinds(phases), delta, round_off, loose)
            if 0 <= epsilon < math.inf:
                return epsilon if len(phases) == 1 else _rounded_up(epsilon)
    return loose


def _rounded_up(epsilon: float) -> float:
    """Rounds up to nine decimals, which hides the order in which steps were composed: that changes the 13th digit."""
    return math.ceil(epsilon * 1e9) / 1e9
