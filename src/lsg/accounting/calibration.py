"""A target (ε, δ) in, the noise multiplier that meets it out."""

import math
from collections.abc import Callable

from lsg.accounting.epsilon import checked_name, composed_epsilon
from lsg.accounting.phases import Phase, checked_delta, checked_phase, is_real
from lsg.errors import ConfigurationError
from lsg.files.sign_of_life import doing

_SMALLEST_NOISE, _LARGEST_NOISE = 1e-3, 1e7


def calibrate_noise(
    *,
    accountant: str,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    tolerance: float = 0.01,
) -> float:
    """The noise multiplier whose ε after `steps` steps is the target or at most `tolerance` below it, never above.

    Where the accountant's ε jumps over that interval (it changes method near its numerical limits) the result is the
    noise on the safe side of the jump.
    """
    name, delta = checked_name(accountant), checked_delta("target_delta", target_delta)
    for label, value in (("target_epsilon", target_epsilon), ("tolerance", tolerance)):
        if not is_real(value) or not 0 < value < math.inf:
            raise ConfigurationError(f"{label}={value!r} must be a finite number above 0")
    _, rate, count = checked_phase(1.0, sample_rate, steps)
    if count < 1:
        raise ConfigurationError(f"steps={steps!r} must be at least 1: there is nothing to calibrate for")
    ever_sampled = -math.expm1(count * math.log1p(-rate)) if rate < 1 else 1.0
    if delta >= ever_sampled:
        raise ConfigurationError(
            f"target_delta={delta!r} is no less than the chance {ever_sampled:.3g} that a given record is ever sampled "
            f"(sample_rate={rate!r}, steps={count!r}), so it would hold without any noise and protect nobody: "
            "choose a target_delta well below one over the number of records"
        )

    def epsilon_with(method: str) -> Callable[[float], float]:
        return lambda noise: composed_epsilon(method, (Phase(noise, rate, count),), delta)

    # RDP is cheap and within some 10 % of the others, so it brings the search close before they are asked at all.
    with doing(f"finding the noise for epsilon {target_epsilon:g}"):
        start, _ = _search(epsilon_with("rdp"), target_epsilon, 0.05 * target_epsilon, start=1.0)
        # A small target deserves a relative tolerance too: 0 lies within 0.01 of 0.01, at any amount of noise.
        noise, epsilon = _search(epsilon_with(name), target_epsilon, min(tolerance, 0.02 * target_epsilon), start)
    if not epsilon <= target_epsilon:
        raise ConfigurationError(
            f"target_epsilon={target_epsilon!r} cannot be reached at target_delta={delta!r} with "
            f"accountant={name!r}: noise_multiplier={noise:.3g} still gives ε={epsilon:.4g}. Raise target_epsilon or "
            "target_delta" + ("" if name == "prv" else ', or use accountant="prv"')
        )
    return noise


def _search(epsilon_at: Callable[[float], float], target: float, tolerance: float, start: float) -> tuple[float, float]:
    """A noise with target − tolerance ≤ ε ≤ target, and its ε; where there is none, the safe side of the jump.

    ε falls with the noise, nearly as a power of it, so it is interpolated in logarithms between the two sides of the
    target (regula falsi, Illinois variant). An ε above the target is returned only when the largest noise gives it.
    """
    aim = target - tolerance / 2
    noise = min(max(start, _SMALLEST_NOISE), _LARGEST_NOISE)
    little, little_gap = 0.0, 0.0  # a noise that is too little (0: none known), and log(ε / aim) there
    enough, enough_gap, enough_epsilon = math.inf, 0.0, math.inf  # a noise that is enough (inf: none known)
    was_enough: bool | None = None
    for _ in range(100):
        epsilon = epsilon_at(noise)
        gap = math.log(min(max(epsilon / aim, 1e-9), 1e9))
        is_enough = epsilon <= target
        if is_enough:
            enough, enough_gap, enough_epsilon = noise, gap, epsilon
            if epsilon >= target - tolerance or noise <= _SMALLEST_NOISE:
                break
        else:
            little, little_gap = noise, gap
            if noise >= _LARGEST_NOISE:
                return noise, epsilon
        if enough == math.inf:
            noise = min(noise * min(max(1.02 * epsilon / target, 1.1), 8.0), _LARGEST_NOISE)
        elif little == 0.0:
            noise = max(noise * max(min(0.98 * epsilon / target, 0.9), 0.125), _SMALLEST_NOISE)
        else:
            if enough / little < 1 + 1e-9:
                break
            # The same side twice: trust the other end half as much, or a bent curve would creep up on the target.
            if is_enough is was_enough:
                little_gap, enough_gap = (little_gap / 2, gap) if is_enough else (gap, enough_gap / 2)
            share = little_gap / (little_gap - enough_gap)
            noise = little * (enough / little) ** min(max(share, 0.01), 0.99)
        was_enough = is_enough
    return enough, enough_epsilon
