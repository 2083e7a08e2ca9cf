"""Phases and δ in, ε out, by Rényi divergences: the loosest of the three accountants, the sturdiest and the fastest."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lsg.accounting.libraries import NUMERICAL_FAILURES, quiet
from lsg.accounting.phases import Phase

ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024)
Curve = tuple[float, ...]  # the Rényi divergence at each of ORDERS
_Array = NDArray[np.float64]

_WHOLE = np.array([float(order).is_integer() for order in ORDERS])
_TERMS = (32, 128, 1000)  # of the series at a fractional order: few first, more where needed, dp-accounting's most last


@lru_cache(maxsize=4096)
def rdp_epsilon(phases: tuple[Phase, ...], delta: float) -> float:
    """ε by Rényi divergences, at higher orders than Opacus's and by series that always end."""
    try:
        return curve_epsilon(rdp_curve(phases), delta)
    except NUMERICAL_FAILURES:
        return math.inf


@lru_cache(maxsize=1024)
def rdp_curve(phases: tuple[Phase, ...]) -> Curve:
    """The divergences between the outputs of all phases on neighbouring data."""
    total = np.zeros(len(ORDERS))
    with quiet():
        for noise, rate, steps in phases:
            total += steps * step_divergences(noise, rate)
    return tuple(map(float, total))


def curve_epsilon(curve: Curve, delta: float) -> float:
    """The ε at δ that the divergences certify; infinite where they are not numbers."""
    with quiet():
        from dp_accounting.rdp import compute_epsilon

        epsilon = float(compute_epsilon(ORDERS, curve, delta)[0])
    # A divergence that rounds to zero or below makes the library answer 0. No order certifies less than the last one
    # does without any divergence, so nothing below it is believed.
    floor = math.log1p(-1 / ORDERS[-1]) - math.log(delta * ORDERS[-1]) / (ORDERS[-1] - 1)
    return max(epsilon, floor, 0.0) if not math.isnan(epsilon) else math.inf


@lru_cache(maxsize=8192)
def step_divergences(noise: float, rate: float) -> _Array:
    """One step's divergence at each of ORDERS (Mironov, Talwar & Zhang 2019, arXiv:1908.10530, section 3.3).

    These are dp-accounting's sums, term by term and in its order, so that they round to the same numbers. It adds up
    one term at a time in Python; here an array operation adds up all orders, which takes a thirtieth of the time.
    """
    if rate == 1:
        return np.array([order / (2 * noise**2) for order in ORDERS])
    logs = np.empty(len(ORDERS))
    logs[_WHOLE], logs[~_WHOLE] = _whole_orders(noise, rate), _fractional_orders(noise, rate)
    divergences = logs / (np.array(ORDERS) - 1)
    # What is no number certifies nothing.
    return np.where(np.isnan(divergences), np.inf, divergences)


def _whole_orders(noise: float, rate: float) -> _Array:
    """log A at each whole order: a binomial sum."""
    orders, index, starts, log_binomials = _whole_terms()
    exponents = (index * index - index) / _divisor(noise)
    terms = log_binomials + index * math.log(rate) + (orders - index) * math.log1p(-rate) + exponents
    return np.logaddexp.reduceat(terms, starts)


@lru_cache(maxsize=1)
def _whole_terms() -> tuple[_Array, _Array, NDArray[np.intp], _Array]:
    """Order, index and log of the binomial coefficient of each term, and where each order's terms begin."""
    whole = [int(order) for order in ORDERS if float(order).is_integer()]
    orders = np.repeat(np.array(whole, float), [order + 1 for order in whole])
    index = np.concatenate([np.arange(order + 1.0) for order in whole])
    starts = np.cumsum([0, *(order + 1 for order in whole[:-1])])
    return orders, index, starts, _log_binomial(orders, index)


def _fractional_orders(noise: float, rate: float) -> _Array:
    """log A at each fractional order: two series, summed until further terms no longer count; infinite if they do."""
    orders = np.array(ORDERS)[~_WHOLE]
    sums, left = np.full(len(orders), np.inf), np.arange(len(orders))
    for terms in _TERMS:
        total, ends = _series(noise, rate, orders[left, None], terms)
        ended = ends.any(1)
        sums[left[ended]] = total[ended, ends[ended].argmax(1)]
        left = left[~ended]
        if not len(left):
            break
    return sums


def _series(noise: float, rate: float, orders: _Array, terms: int) -> tuple[_Array, NDArray[np.bool_]]:
    """The sum up to each term, and whether it may end there: both series fall, to e⁻³⁰ of the sum or less."""
    from scipy.special import log_ndtr

    index = np.arange(float(terms))
    rest = orders - index
    middle = noise**2 * math.log(1 / rate - 1) + 0.5
    log_binomials, width = _log_binomial(orders, index), math.sqrt(2) * noise

    def log_tail(x: _Array) -> _Array:
        return math.log(0.5) + (math.log(2) + log_ndtr(-x * 2**0.5))

    exponents = ((index * index - index) / _divisor(noise), (rest * rest - rest) / _divisor(noise))
    low = log_binomials + index * math.log(rate) + rest * math.log1p(-rate)
    low = low + exponents[0] + log_tail((index - middle) / width)
    high = log_binomials + rest * math.log(rate) + index * math.log1p(-rate)
    high = high + exponents[1] + log_tail((middle - rest) / width)
    total = np.logaddexp(np.logaddexp.accumulate(low, axis=1), np.logaddexp.accumulate(high, axis=1))
    falls = (np.diff(low, prepend=-np.inf) < 0) & (np.diff(high, prepend=-np.inf) < 0)
    return total, falls & (np.maximum(low, high) < total - 30)


def _log_binomial(orders: _Array, index: _Array) -> _Array:
    from scipy.special import gammaln

    return gammaln(orders + 1) - gammaln(index + 1) - gammaln(orders - index + 1)


def _divisor(noise: float) -> float:
    divisor = 2 * noise**2
    if divisor == 0:
        raise ZeroDivisionError(f"the square of noise_multiplier={noise!r} is no number above 0")
    return divisor
