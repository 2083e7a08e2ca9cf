"""The price of choosing: the Rényi curve of one run and how many runs are drawn in, ε of releasing the best run out.

A search draws a number K of runs, whatever the data, makes K independent runs of one mechanism, and releases the run
of the highest score: model, settings and score. The other runs and K itself stay secret. Papernot & Steinke,
"Hyperparameter tuning with Rényi differential privacy" (ICLR 2022, arXiv:2110.03620), bound what this costs:

- K geometric with mean m (their theorem 2 with η = 1): at order λ the run's own divergence ε(λ), plus log(m) / (λ - 1),
  plus 2 min over orders κ of (1 - 1/κ) ε(κ) + log(m) / κ.
- K Poisson with mean μ (their theorem 6): ε(λ) + log(μ) / (λ - 1) + μ δ, where one run is (log(1 + 1/(λ-1)), δ)-DP.

A Poisson number may be 0, and a search without runs has no result. So K is drawn given that it is not 0. That event has
the same probability c = 1 - exp(-μ) on all data: P(S and K > 0) <= e^ε P'(S and K > 0) + δ c, divided by c, is
(ε, δ)-privacy. So the bound is taken at δ c.

One run draws its settings at random, too. Its divergence is at most the largest of its candidates': `largest`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lsg.accounting.phases import Phase
from lsg.accounting.rdp import ORDERS, Curve, curve_epsilon, rdp_curve
from lsg.errors import ConfigurationError

DRAWS = ("poisson", "geometric")
_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6
_LEAST_DIVERGENCE = 1e-18  # less is rounding
_MOST_RUNS = 500  # the chance of no run at all must be a number above 0


@dataclass(frozen=True)
class Repeats:
    """How the number of runs is drawn. mean: of the distribution; a Poisson number is drawn given that it is not 0."""

    draw: str
    mean: float

    def __post_init__(self) -> None:
        if self.draw not in DRAWS:
            raise ConfigurationError(f"the number of runs is drawn as one of {', '.join(DRAWS)}, not {self.draw!r}")
        if not 1 <= self.mean <= _MOST_RUNS:
            raise ConfigurationError(f"{self.mean:g} runs on average: must be 1 to {_MOST_RUNS}")

    @property
    def chance_of_none(self) -> float:
        return math.exp(-self.mean) if self.draw == "poisson" else 0.0

    def number(self, uniform: float) -> int:
        """The number of runs at this uniform random number in [0, 1): the inverse of its distribution function."""
        if self.draw == "geometric":
            return 1 if self.mean == 1 else 1 + math.floor(math.log1p(-uniform) / math.log1p(-1 / self.mean))
        rest = uniform * (1 - self.chance_of_none)
        count, probability = 1, self.mean * self.chance_of_none
        while rest >= probability and probability > 0:
            rest -= probability
            count += 1
            probability *= self.mean / count
        return count


def selection_curve(curve: Curve, repeats: Repeats) -> Curve:
    """The divergences of the best of the repeated runs. curve: of one run."""
    curve = tuple(max(value, 0.0) for value in curve)
    if repeats.draw == "poisson":
        return tuple(
            value + repeats.mean * delta + math.log(repeats.mean) / (order - 1)
            for order, value, delta in zip(ORDERS, curve, _deltas(curve), strict=True)
        )
    both = [
        (1 - 1 / order) * value + math.log(repeats.mean) / order for order, value in zip(ORDERS, curve, strict=True)
    ]
    return tuple(
        value + math.log(repeats.mean) / (order - 1) + 2 * min(both) for order, value in zip(ORDERS, curve, strict=True)
    )


def selection_epsilon(curve: Curve, repeats: Repeats, delta: float) -> float:
    """ε at δ of releasing the best run. curve: of one run."""
    return curve_epsilon(selection_curve(curve, repeats), delta * (1 - repeats.chance_of_none))


def largest(curves: Sequence[Curve]) -> Curve:
    return tuple(max(values) for values in zip(*curves, strict=True))


def gaussian_curve(noise_multiplier: float) -> Curve:
    """Of one number of sensitivity 1 with Gaussian noise."""
    return tuple(order / (2 * noise_multiplier**2) for order in ORDERS)


def calibrate_score_noise(repeats: Repeats, epsilon: float, delta: float) -> float:
    """The noise on a count of right answers, with which choosing by it costs at most (ε, δ)."""
    return _least_noise(lambda noise: selection_epsilon(gaussian_curve(noise), repeats, delta), epsilon)


def calibrate_candidates(
    plans: Sequence[tuple[float, int]], repeats: Repeats, epsilon: float, delta: float
) -> dict[tuple[float, int], float]:
    """For each candidate's (sample rate, steps) the noise multiplier, so that the search costs at most (ε, δ)."""
    noises = {}
    for plan in set(plans):
        rate, steps = plan

        def spent(noise: float, rate: float = rate, steps: int = steps) -> float:
            return selection_epsilon(run_curve(noise, rate, steps), repeats, delta)

        noises[plan] = _least_noise(spent, epsilon)
    # Each candidate alone keeps to ε. Drawn at random among others it may cost a little more.
    while selection_epsilon(largest([run_curve(n, *plan) for plan, n in noises.items()]), repeats, delta) > epsilon:
        noises = {plan: 1.005 * noise for plan, noise in noises.items()}
    return noises


def run_curve(noise_multiplier: float, sample_rate: float, steps: int) -> Curve:
    return rdp_curve((Phase(noise_multiplier, sample_rate, steps),))


def _least_noise(spent: Callable[[float], float], epsilon: float) -> float:
    """The least noise, to a thousandth, that spends no more than ε; spending falls with noise."""
    low, high = _LEAST_NOISE, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise ConfigurationError(
                f"--epsilon {epsilon:g} cannot pay for the search at any noise: raise it or --delta, or lower --runs"
            )
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high


def _deltas(curve: Curve) -> list[float]:
    """At each order λ, the δ at ε = log(1 + 1/(λ-1)) that the divergences certify.

    Each certifies one in two ways: by proposition 12 of Canonne, Kamath & Steinke 2020 (arXiv:2004.00010), and by the
    total variation (Bretagnolle & Huber's inequality), which holds at any ε.
    """
    orders, values = np.array(ORDERS), np.array(curve)
    epsilons = np.log1p(1 / (orders - 1))[:, None]
    by_order = (orders - 1) * (values - epsilons + np.log1p(-1 / orders)) - np.log(orders)
    by_variation = np.log(-np.expm1(-np.maximum(values, _LEAST_DIVERGENCE))) / 2
    return [float(delta) for delta in np.exp(np.minimum(by_order, by_variation).min(axis=1))]
