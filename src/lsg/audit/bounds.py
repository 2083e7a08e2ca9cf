"""How often an attack was right in, a lower confidence bound on epsilon out.

An attack on one record decides between two hypotheses, the record was in the data or it was not. FPR and TPR are how
often it says "in" under either. (ε, δ)-privacy means TPR ≤ e^ε FPR + δ and 1 − FPR ≤ e^ε (1 − TPR) + δ for every attack
(Kairouz et al. 2015); both rates are known up to their Clopper-Pearson limits only, which are exact.

Every bound here exceeds the truth with a probability of at most `alpha`.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri
from scipy.stats import beta, binom

_CHOOSING = 0.2  # the share of the trials that thresholds are chosen on; bounds are computed on the others
_LOOSE_ALPHA = 0.1  # in place of alpha, where the pilot is too small to tell one threshold from another
_THRESHOLDS = 100
_LOSS_GRID = 5e-3  # of privacy losses; ten times finer changed no bound by 0.001


@dataclass(frozen=True)
class Mechanism:
    """Steps of a Poisson-sampled Gaussian mechanism, without its noise multiplier: that is what is measured."""

    sample_rate: float = 1.0
    steps: int = 1


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on epsilon, each holding with probability 1 − alpha / 2, so that both together hold with 1 − alpha.

    threshold: whatever the mechanism is. It cannot pass ln(trials), and is far below the truth for small delta.
    mechanism: of a mechanism known to be Gaussian (and sampled) with a noise that is not known: the most noise that
        could let the attack be as right as it was (Nasr et al. 2023, "Tight Auditing").
    """

    threshold: float
    mechanism: float
    trials: int

    @property
    def epsilon(self) -> float:
        return max(self.threshold, self.mechanism)


def at_least(successes: int, trials: int, alpha: float) -> float:
    """Clopper-Pearson: the probability of success is below this with probability at most alpha."""
    return float(beta.ppf(alpha, successes, trials - successes + 1)) if successes else 0.0


def at_most(successes: int, trials: int, alpha: float) -> float:
    """Clopper-Pearson: the probability of success is above this with probability at most alpha."""
    return float(beta.ppf(1 - alpha, successes + 1, trials - successes)) if successes < trials else 1.0


def lower_bounds(
    absent: np.ndarray, present: np.ndarray, *, mechanism: Mechanism, delta: float, alpha: float
) -> Bounds:
    """Bounds from a statistic observed without and with the record; the attack says "in" where it is large."""
    splits = [round(len(values) * _CHOOSING) for values in (absent, present)]
    pilot = [values[:split] for values, split in zip((absent, present), splits, strict=True)]
    rest = [values[split:] for values, split in zip((absent, present), splits, strict=True)]
    thresholds = np.unique(np.quantile(np.concatenate(pilot), np.linspace(0, 1, _THRESHOLDS)))

    def limits(threshold: float, samples: list[np.ndarray], wrong: float) -> tuple[float, float]:
        """FPR at most, TPR at least: each of them wrong with this probability."""
        false, true = (int((values > threshold).sum()) for values in samples)
        return at_most(false, len(samples[0]), wrong), at_least(true, len(samples[1]), wrong)

    on_pilot = [[limits(threshold, pilot, wrong) for wrong in (alpha / 4, _LOOSE_ALPHA)] for threshold in thresholds]
    free = max(range(len(thresholds)), key=lambda i: [epsilon_of_rates(*rates, delta) for rates in on_pilot[i]])
    gaussian = max(range(len(thresholds)), key=lambda i: [mu_of_rates(*rates) for rates in on_pilot[i]])
    return Bounds(
        threshold=epsilon_of_rates(*limits(thresholds[free], rest, alpha / 4), delta),
        mechanism=epsilon_of_mechanism(*limits(thresholds[gaussian], rest, alpha / 4), mechanism, delta),
        trials=len(rest[0]) + len(rest[1]),
    )


def epsilon_of_rates(fpr: float, tpr: float, delta: float) -> float:
    """The least epsilon that allows these rates."""
    return max(0.0, _log_ratio(tpr - delta, fpr), _log_ratio(1 - fpr - delta, 1 - tpr))


def _log_ratio(above: float, below: float) -> float:
    return -math.inf if above <= 0 else math.inf if below <= 0 else math.log(above / below)


def mu_of_rates(fpr: float, tpr: float) -> float:
    """The least separation of two unit Gaussians that allows these rates (Dong et al. 2022, Gaussian DP)."""
    return max(0.0, float(ndtri(tpr) - ndtri(fpr)))


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Epsilon of telling N(0, 1) from N(mu, 1), exactly (Balle and Wang 2018)."""
    if mu <= 0:
        return 0.0
    if not math.isfinite(mu):
        return math.inf

    def excess(epsilon: float) -> float:
        spent = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        return spent - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) - delta

    if excess(0.0) <= 0:
        return 0.0
    highest = mu * mu / 2 + mu * (1 - float(ndtri(delta)))
    return float(brentq(excess, 0.0, highest))


def epsilon_of_mechanism(fpr: float, tpr: float, mechanism: Mechanism, delta: float) -> float:
    """The epsilon of the noisiest such mechanism that allows these rates."""
    if mechanism.sample_rate == 1:
        return epsilon_of_mu(mu_of_rates(fpr, tpr), delta)  # steps add up to one Gaussian, whose mu is all there is
    if tpr <= fpr:
        return 0.0
    quiet, loud = 0.05, 1.0  # noise multipliers: one that allows the rates, one that does not
    while _allows(loud, fpr, tpr, mechanism):
        quiet, loud = loud, 2 * loud
    for _ in range(12):
        middle = math.sqrt(quiet * loud)
        quiet, loud = (middle, loud) if _allows(middle, fpr, tpr, mechanism) else (quiet, middle)
    return float(_losses(loud, mechanism).get_epsilon_for_delta(delta))


def _allows(noise_multiplier: float, fpr: float, tpr: float, mechanism: Mechanism) -> bool:
    epsilons = np.linspace(0.0, 10.0, 101)
    deltas = np.asarray(_losses(noise_multiplier, mechanism).get_delta_for_epsilon(epsilons))
    factors = np.exp(epsilons)
    return bool((tpr <= factors * fpr + deltas).all() and (1 - fpr <= factors * (1 - tpr) + deltas).all())


def _losses(noise_multiplier: float, mechanism: Mechanism):  # type: ignore[no-untyped-def]  # the library has no types
    """The mechanism's privacy losses, none of them rounded down: what they do not allow is impossible."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = pld.from_gaussian_mechanism(
            noise_multiplier,
            value_discretization_interval=_LOSS_GRID,
            sampling_prob=mechanism.sample_rate,
            use_connect_dots=True,
        )
        return one.self_compose(mechanism.steps)


def one_run_p_value(*, canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """How likely an (ε, δ)-private algorithm lets `correct` of `guesses` be right (Steinke et al. 2023, Theorem 5.2).

    Each of `canaries` records was in the data by a fair coin of its own; the guesses see the algorithm's output alone.
    """
    right = 1 / (1 + math.exp(-epsilon))
    likely = float(binom.sf(correct - 1, guesses, right))
    # Failures of probability δ a canary may make i more guesses right at a time: the worst i is taken.
    below = np.cumsum(binom.pmf(correct - np.arange(1, correct + 1), guesses, right))
    slope = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, likely + 2 * canaries * delta * slope)


def one_run_bound(*, canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """The least epsilon at which so many right guesses are not less likely than alpha."""

    def refuted(epsilon: float) -> bool:
        found = {"canaries": canaries, "guesses": guesses, "correct": correct}
        return one_run_p_value(**found, epsilon=epsilon, delta=delta) < alpha

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, high + 1
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
