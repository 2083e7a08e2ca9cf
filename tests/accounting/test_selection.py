"""Releasing the best of several runs: ε against the library's own bound, and against mechanisms computed exactly."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant

from lsg.accounting.rdp import ORDERS, Curve, curve_epsilon
from lsg.accounting.selection import (
    DRAWS,
    Repeats,
    calibrate_candidates,
    calibrate_score_noise,
    gaussian_curve,
    largest,
    run_curve,
    selection_curve,
    selection_epsilon,
)
from lsg.errors import ConfigurationError

SHAPE = {"poisson": math.inf, "geometric": 1.0}  # as dp-accounting, by the authors of the bound, names them


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("mean", [1, 3, 10])
def test_the_curve_is_that_of_dp_accounting(draw: str, mean: int) -> None:
    step = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    run = dp_accounting.SelfComposedDpEvent(step, 50)
    accountant = RdpAccountant(list(ORDERS))
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(run, mean, SHAPE[draw]))
    ours = selection_curve(run_curve(2.0, 0.1, 50), Repeats(draw, mean))
    if draw == "geometric":  # the library takes the least over higher orders, which conversion to ε does not need
        ours = tuple(min(ours[i:]) for i in range(len(ours)))
    assert np.allclose(ours, accountant.rdp, rtol=1e-9, atol=1e-12)


def test_a_geometric_number_of_runs_triples_a_pure_epsilon() -> None:
    """Liu & Talwar 2019, theorem 1.3: 3 ε. The orders end at 1024, where log(mean) / order is left."""
    pure = tuple(0.2 for _ in ORDERS)
    assert selection_curve(pure, Repeats("geometric", 2))[-1] == pytest.approx(3 * 0.2, abs=3 * math.log(2) / 1000)


def generating(repeats: Repeats, below: np.ndarray) -> np.ndarray:
    """E[F^K], the distribution function of the best of K runs with distribution function F."""
    if repeats.draw == "geometric":
        return below / repeats.mean / (1 - below * (1 - 1 / repeats.mean))
    none = math.exp(-repeats.mean)
    return (np.exp(repeats.mean * (below - 1)) - none) / (1 - none)


def divergences(p: np.ndarray, q: np.ndarray) -> Curve:
    def one(order: float, a: np.ndarray, b: np.ndarray) -> float:
        return float(np.logaddexp.reduce(order * np.log(a) + (1 - order) * np.log(b))) / (order - 1)

    return tuple(max(one(order, p, q), one(order, q, p)) for order in ORDERS)


def exact_delta(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) for a, b in ((p, q), (q, p)))


@pytest.mark.parametrize("draw", DRAWS)
def test_the_epsilon_holds_for_mechanisms_computed_exactly(draw: str) -> None:
    """Random mechanisms with a few ordered outcomes: ε of the bound against the true δ of the best of K runs.

    That one run's ε would not do is what makes the test able to fail.
    """
    random, broken = np.random.default_rng(0), 0
    for _ in range(100):
        repeats, delta = Repeats(draw, float(random.uniform(1, 12))), float(10 ** random.uniform(-4, -1))
        p = random.dirichlet(np.ones(4))
        q = p * np.exp(random.uniform(-0.7, 0.7, 4))
        q /= q.sum()
        best = [np.diff(generating(repeats, np.minimum(np.cumsum(x), 1)), prepend=0.0) for x in (p, q)]
        curve = divergences(p, q)
        assert exact_delta(*best, selection_epsilon(curve, repeats, delta)) <= delta
        broken += exact_delta(*best, curve_epsilon(curve, delta)) > delta
    assert broken >= 5


@pytest.mark.parametrize("draw", DRAWS)
def test_more_runs_cost_more_and_one_run_is_no_cheaper_than_itself(draw: str) -> None:
    curve = run_curve(1.5, 0.05, 200)
    costs = [selection_epsilon(curve, Repeats(draw, mean), 1e-5) for mean in (1, 2, 5, 10, 30)]
    assert costs == sorted(costs)
    assert costs[0] >= curve_epsilon(curve, 1e-5)


def test_a_number_of_runs_that_is_not_0_is_paid_in_delta() -> None:
    """Poisson with mean 1 is 0 in 37 % of all draws: given that it is not, δ is that of the others alone."""
    curve, repeats = run_curve(1.5, 0.05, 200), Repeats("poisson", 1)
    given_one = curve_epsilon(selection_curve(curve, repeats), 1e-5 * (1 - math.exp(-1)))
    assert selection_epsilon(curve, repeats, 1e-5) == given_one > curve_epsilon(selection_curve(curve, repeats), 1e-5)


@pytest.mark.parametrize("draw", DRAWS)
def test_the_number_of_runs_has_its_distribution(draw: str) -> None:
    """Evenly spread uniform numbers fall into each number as often as its probability says."""
    repeats, spread = Repeats(draw, 4), 20_000
    numbers = [repeats.number((i + 0.5) / spread) for i in range(spread)]
    assert min(numbers) == 1
    for count in range(1, 12):
        if draw == "geometric":
            probability = 0.25 * 0.75 ** (count - 1)
        else:
            probability = math.exp(-4) * 4**count / math.factorial(count) / (1 - math.exp(-4))
        assert numbers.count(count) / spread == pytest.approx(probability, abs=2 / spread)
    assert Repeats("geometric", 1).number(0.999) == 1
    assert 480 < Repeats("poisson", 500).number(0.5) < 520


@pytest.mark.parametrize("draw", DRAWS)
def test_calibrated_candidates_spend_the_budget_together(draw: str) -> None:
    repeats, plans = Repeats(draw, 4), [(0.05, 100), (0.2, 50), (0.05, 100)]
    noises = calibrate_candidates(plans, repeats, 2.0, 1e-5)
    assert noises.keys() == set(plans)
    spent = selection_epsilon(largest([run_curve(noise, *plan) for plan, noise in noises.items()]), repeats, 1e-5)
    assert 1.95 < spent <= 2.0
    score_noise = calibrate_score_noise(repeats, 2.0, 1e-5)
    assert 1.95 < selection_epsilon(gaussian_curve(score_noise), repeats, 1e-5) <= 2.0


def test_what_cannot_be_drawn_or_paid_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="poisson, geometric"):
        Repeats("uniform", 3)
    with pytest.raises(ConfigurationError, match="1 to 500"):
        Repeats("poisson", 0)
    with pytest.raises(ConfigurationError, match="--epsilon 1e-09 cannot pay"):
        calibrate_score_noise(Repeats("poisson", 5), 1e-9, 1e-5)
