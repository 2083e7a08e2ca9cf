"""Budgets: each of the four unknowns is found, stays within ε, and bad input is named."""

import pytest

from lsg.accounting.budget import Budget, plan_budget, safe_delta
from lsg.accounting.epsilon import epsilon_of
from lsg.errors import ConfigurationError

SST2 = {"records": 67_349, "delta": 1e-5}


def test_epsilon_is_that_of_the_sampling_plan() -> None:
    plan = plan_budget(**SST2, noise_multiplier=1.27, epochs=20, batch_size=2000)
    rate, steps = 2000 / 67_349, 673
    wanted = epsilon_of(accountant="prv", noise_multiplier=1.27, sample_rate=rate, steps=steps, delta=1e-5)
    assert (plan.steps, plan.epsilon) == (steps, wanted)
    assert plan.epsilon_by("rdp") > plan.epsilon


def test_noise_is_calibrated_to_the_target() -> None:
    plan = plan_budget(**SST2, epsilon=3.3, epochs=20, batch_size=2000)
    assert 3.29 <= plan.epsilon <= 3.3


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_epochs_are_the_most_within_epsilon(accountant: str) -> None:
    plan = plan_budget(**SST2, epsilon=3.3, noise_multiplier=1.27, batch_size=2000, accountant=accountant)
    more = plan_budget(
        **SST2, noise_multiplier=1.27, batch_size=2000, epochs=plan.epochs + 1, accountant=accountant
    ).epsilon
    assert plan.epsilon <= 3.3 < more


def test_the_batch_is_the_largest_within_epsilon() -> None:
    plan = plan_budget(**SST2, epsilon=3.3, noise_multiplier=1.27, epochs=20)
    more = plan_budget(**SST2, noise_multiplier=1.27, epochs=20, batch_size=plan.batch_size + 20).epsilon
    assert plan.epsilon <= 3.3 < more


def test_a_large_budget_allows_the_full_batch() -> None:
    plan = plan_budget(**SST2, epsilon=50.0, noise_multiplier=5.0, epochs=1)
    assert plan.batch_size == 67_349


def test_spending_grows_over_training_up_to_the_total() -> None:
    plan = Budget(1000, 1e-5, "rdp", 1.0, 4, 100, 0.0)
    trajectory = plan.over_training(10)
    assert [steps for steps, _ in trajectory] == [4 * i for i in range(1, 11)]
    spent = [epsilon for _, epsilon in trajectory]
    assert spent == sorted(spent) and spent[-1] == plan.epsilon_by("rdp")
    assert Budget(1000, 1e-5, "rdp", 1.0, 1, 500, 0.0).over_training(10)[-1][0] == 2  # fewer steps than points


def test_another_batch_spends_alike_with_other_noise() -> None:
    plan = plan_budget(records=5000, delta=1e-6, accountant="rdp", epsilon=3.0, epochs=5, batch_size=100)
    larger = plan.with_batch(400)
    assert larger.epsilon <= plan.epsilon and larger.epsilon == pytest.approx(plan.epsilon, abs=0.07)
    assert larger.noise_multiplier > plan.noise_multiplier
    assert larger.noise_multiplier / 400 < plan.noise_multiplier / 100


@pytest.mark.parametrize(("records", "delta"), [(67_349, 1e-6), (100_000, 1e-6), (1_797, 1e-5), (1, 0.1)])
def test_the_default_delta_is_well_below_one_over_n(records: int, delta: float) -> None:
    assert safe_delta(records) == pytest.approx(delta)
    assert safe_delta(records) <= 0.1 / records * (1 + 1e-12)


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"epsilon": None}, "leave out the one to compute"),
        ({"noise_multiplier": 1.0}, "given: --epsilon, --noise-multiplier, --epochs, --batch-size"),
        ({"epsilon": -1.0}, "--epsilon -1"),
        ({"epsilon": float("nan")}, "--epsilon nan"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"batch_size": 2000}, "larger than --records 1000"),
        ({"epochs": 0}, "--epochs 0"),
        ({"records": 0}, "--records 0"),
        ({"delta": 0.01}, "--delta 0.01"),
        ({"accountant": "magic"}, "magic"),
        ({"noise_multiplier": 0.2, "epochs": None}, "one epoch spends"),
        ({"noise_multiplier": 0.1, "batch_size": None}, "even batches of one record spend"),
        ({"noise_multiplier": 500.0, "epochs": None, "epsilon": 50.0}, "not used up by 100,000 epochs"),
    ],
)
def test_bad_plans_are_refused_by_option(change: dict, culprit: str) -> None:
    plan = {"records": 1000, "delta": 1e-5, "epsilon": 1.0, "epochs": 3, "batch_size": 50, "accountant": "rdp"}
    with pytest.raises(ConfigurationError, match=culprit):
        plan_budget(**(plan | change))
