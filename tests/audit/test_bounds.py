"""Bounds against known answers: the Gaussian mechanism, exact coverage, the published one-run numbers."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from lsg.accounting.epsilon import epsilon_of
from lsg.audit.bounds import (
    Mechanism,
    at_least,
    at_most,
    epsilon_of_mechanism,
    epsilon_of_mu,
    epsilon_of_rates,
    lower_bounds,
    one_run_bound,
    one_run_p_value,
)


@pytest.mark.parametrize("mu", [0.2, 0.7, 1.5, 4.0])
def test_epsilon_of_a_gaussian_is_the_accountants(mu: float) -> None:
    claimed = epsilon_of(accountant="pld", noise_multiplier=1 / mu, sample_rate=1.0, steps=1, delta=1e-5)
    assert epsilon_of_mu(mu, 1e-5) == pytest.approx(claimed, abs=0.01)


def test_clopper_pearson_limits() -> None:
    assert at_most(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))  # the rule of three, exactly
    assert at_least(100, 100, 0.05) == pytest.approx(0.05 ** (1 / 100))
    assert at_least(0, 10, 0.05) == 0 and at_most(10, 10, 0.05) == 1


def test_rates_and_epsilon() -> None:
    assert epsilon_of_rates(0.1, 0.2, 0.0) == pytest.approx(math.log(2))
    assert epsilon_of_rates(0.8, 0.9, 0.0) == pytest.approx(math.log(2))  # 1 - FPR against 1 - TPR
    assert epsilon_of_rates(0.5, 0.4, 1e-5) == 0


def test_a_sampled_mechanism_gets_back_its_own_epsilon() -> None:
    """The best threshold on one step: rates on the trade-off curve, so the noise is found again."""
    rate, sigma, delta = 0.25, 0.8, 1e-5
    threshold = 1.5
    fpr = norm.sf(threshold / sigma)
    tpr = (1 - rate) * fpr + rate * norm.sf((threshold - 1) / sigma)
    claimed = epsilon_of(accountant="pld", noise_multiplier=sigma, sample_rate=rate, steps=1, delta=delta)
    assert epsilon_of_mechanism(fpr, tpr, Mechanism(rate, 1), delta) == pytest.approx(claimed, rel=0.03)


def test_bounds_hold_as_often_as_they_say() -> None:
    """At alpha = 0.2 the bound may pass the truth in 20 % of cases: more than 25 of 60 happens once in 29,000 runs."""
    random, mu, delta = np.random.default_rng(0), 1.0, 1e-5
    truth, passed, close = epsilon_of_mu(mu, delta), 0, 0
    for _ in range(60):
        absent, present = random.normal(0, 1, 1000), random.normal(mu, 1, 1000)
        bounds = lower_bounds(absent, present, mechanism=Mechanism(), delta=delta, alpha=0.2)
        passed += bounds.epsilon > truth
        close += bounds.mechanism > 0.6 * truth
    assert passed <= 25 and close >= 55


def test_a_statistic_that_never_varies_shows_nothing() -> None:
    same = np.zeros(500)
    assert lower_bounds(same, same, mechanism=Mechanism(), delta=1e-5, alpha=0.01).epsilon == 0


def test_one_run_numbers() -> None:
    """Without delta the p-value is the binomial's tail. With all of 100 guesses right at 95 % epsilon is ln(r / (1-r))
    for r = 0.05^(1/100)."""
    assert one_run_p_value(canaries=100, guesses=100, correct=100, epsilon=1.0, delta=0.0) == pytest.approx(
        (1 / (1 + math.exp(-1))) ** 100
    )
    right = 0.05 ** (1 / 100)
    found = one_run_bound(canaries=100, guesses=100, correct=100, delta=0.0, alpha=0.05)
    assert found == pytest.approx(math.log(right / (1 - right)), abs=1e-6)
    assert one_run_bound(canaries=100, guesses=100, correct=100, delta=1e-3, alpha=0.05) < found
    assert one_run_bound(canaries=100, guesses=100, correct=55, delta=1e-5, alpha=0.05) == 0


def test_little_evidence_is_used_too() -> None:
    """A pilot so small that its own limits tell nothing must still choose a threshold, and not the first one."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        absent, present = rng.standard_normal(400), rng.standard_normal(400) + 0.8
        found = lower_bounds(absent, present, mechanism=Mechanism(), delta=1e-5, alpha=1e-3)
        assert 0 < found.mechanism <= epsilon_of_mu(0.8, 1e-5)
