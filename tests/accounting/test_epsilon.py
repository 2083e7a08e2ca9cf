"""ε against the paper's table, the exact Gaussian mechanism and other accountants; calibration; the ledger."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lsg.accounting import calibrate_noise, calibration, create_accountant, epsilon_of, prv
from lsg.accounting import epsilon as accounting
from lsg.accounting.epsilon import ACCOUNTANTS
from lsg.errors import ConfigurationError

DELTA = 1e-5
SST2 = {"sample_rate": 2000 / 67349, "steps": round(20 * 67349 / 2000)}
CIFAR = {"sample_rate": 1000 / 50000, "steps": 200 * 50000 // 1000}
# (run, σ, ε as printed in the paper).
ROWS = [
    (SST2, 2.70, 1.2),
    (SST2, 2.11, 1.6),
    (SST2, 1.27, 3.3),
    (SST2, 0.878, 6.5),
    (CIFAR, 9.85, 0.8),
    (CIFAR, 5.07, 1.7),
    (CIFAR, 2.705, 3.3),
    (CIFAR, 1.557, 6.8),
]
# Printed for σ = 5.07 is 1.7. PRV gives 1.564 and PLD 1.554, which have to agree within 0.02: no value satisfies both.
OFF = pytest.mark.xfail(strict=True, reason="printed with PRV's error set to 0.1: see test_the_papers_own_setting")
TIGHT_ROWS = [pytest.param(*row, marks=OFF if row[1] == 5.07 else ()) for row in ROWS]


def epsilon(accountant, noise, sample_rate=1.0, steps=1, delta=DELTA):
    return epsilon_of(accountant=accountant, noise_multiplier=noise, sample_rate=sample_rate, steps=steps, delta=delta)


def exact_gaussian_epsilon(noise: float, steps: int = 1, delta: float = DELTA) -> float:
    """Balle & Wang 2018, theorem 8, without sampling: δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), μ = √steps / σ."""
    from scipy.special import log_ndtr

    mu = math.sqrt(steps) / noise
    low, high = 0.0, 2000.0
    for _ in range(200):
        middle = (low + high) / 2
        delta_here = np.exp(log_ndtr(mu / 2 - middle / mu)) - np.exp(middle + log_ndtr(-mu / 2 - middle / mu))
        low, high = (middle, high) if delta_here > delta else (low, middle)
    return low


# --- ε ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "noise", "paper"), TIGHT_ROWS)
def test_the_papers_table(run, noise, paper) -> None:
    assert epsilon("prv", noise, **run) == pytest.approx(paper, abs=0.1)


@pytest.mark.parametrize(("run", "noise", "paper"), ROWS)
def test_prv_and_pld_agree_on_the_papers_table(run, noise, paper) -> None:
    prv, pld, rdp = (epsilon(name, noise, **run) for name in ACCOUNTANTS)
    assert prv == pytest.approx(pld, abs=0.02)
    assert rdp > pld


@pytest.mark.filterwarnings("ignore")  # Opacus
@pytest.mark.parametrize(("run", "noise", "paper"), ROWS)
def test_the_papers_own_setting_gives_all_its_figures(run, noise, paper) -> None:
    """With PRV's error bound at 0.1 instead of 0.01 all eight printed figures come out, and ours lie just below."""
    from opacus.accountants import PRVAccountant

    loose = PRVAccountant()
    loose.history = [(noise, run["sample_rate"], run["steps"])]
    printed = loose.get_epsilon(DELTA, eps_error=0.1)
    assert printed == pytest.approx(paper, abs=0.1)
    assert 0 < printed - epsilon("prv", noise, **run) < 0.1


@pytest.mark.parametrize("noise", [0.15, 0.5, 1.0, 4.0, 30.0, 1000.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
def test_one_full_batch_step_against_the_exact_gaussian_mechanism(noise, delta) -> None:
    exact = exact_gaussian_epsilon(noise, delta=delta)
    prv, pld, rdp = (epsilon(name, noise, delta=delta) for name in ACCOUNTANTS)
    assert min(prv, pld, rdp) >= exact - 1e-12
    # Past ε = 10 PRV's error is allowed to be 0.1 % of the looser RDP's ε.
    assert prv <= exact + max(0.02, 0.002 * exact)
    assert pld <= exact + 0.02


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-11, 1e-13])
def test_fft_round_off_never_leads_below_the_truth(delta) -> None:
    # Opacus's PRV and dp-accounting's PLD do fall below it here: by 0.07 and 0.015 at 10,000 steps and δ = 1e-12.
    for steps in (100, 10_000):
        exact = exact_gaussian_epsilon(math.sqrt(steps), steps, delta)
        for name in ACCOUNTANTS:
            assert exact <= epsilon(name, math.sqrt(steps), steps=steps, delta=delta) <= 1.1 * exact


def test_the_mean_loss_of_a_step_is_its_kl_divergence() -> None:
    assert prv._mean_loss(2.0, 1.0) == 1 / 8
    for noise, rate in [(0.8, 0.3), (3.0, 0.01)]:
        x = np.linspace(-12 * noise, 1 + 12 * noise, 1_000_001)
        without = np.exp(-(x**2) / (2 * noise**2)) / math.sqrt(2 * math.pi * noise**2)
        having = np.exp(-((x - 1) ** 2) / (2 * noise**2)) / math.sqrt(2 * math.pi * noise**2)
        mixed = (1 - rate) * without + rate * having
        kl = float(np.sum(mixed * np.log(mixed / without)) * (x[1] - x[0]))
        assert prv._mean_loss(noise, rate) == pytest.approx(kl, rel=1e-9)
    # A rate this small is where plain quadrature loses all its digits: KL → q² (e^{1/σ²} − 1) / 2.
    assert prv._mean_loss(1.0, 1e-9) == pytest.approx(1e-18 * math.expm1(1) / 2, rel=1e-6)


@pytest.mark.parametrize("failure", [RuntimeError("no"), OverflowError("no"), float("nan"), float("inf")])
def test_a_numerical_failure_falls_back_to_the_next_upper_bound(failure, monkeypatch) -> None:
    def broken(*_: object) -> float:
        if isinstance(failure, Exception):
            raise failure
        return failure

    pld, rdp = epsilon("pld", 1.0), epsilon("rdp", 1.0)
    accounting.composed_epsilon.cache_clear()
    monkeypatch.setattr(accounting, "prv_epsilon", broken)
    assert epsilon("prv", 1.0) == pld
    monkeypatch.setattr(accounting, "pld_epsilon", broken)
    accounting.composed_epsilon.cache_clear()
    assert epsilon("prv", 1.0) == epsilon("pld", 1.0) == rdp
    accounting.composed_epsilon.cache_clear()


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_limits(name) -> None:
    assert epsilon(name, 1.0, steps=0) == 0
    assert epsilon(name, 0.0) == math.inf
    assert epsilon(name, 1e-200) == math.inf  # its square underflows: nothing can be said
    assert epsilon(name, 0.02) >= exact_gaussian_epsilon(0.02) > 1000  # beyond the FFTs' grids
    assert 0 < epsilon(name, 1.0, 0.5, 10, delta=1e-30) < math.inf
    assert epsilon(name, 1.0, 1e-7, 1) < 0.5  # δ alone exceeds the chance to be sampled
    assert epsilon(name, 2.0, 0.01, 10**9) < math.inf


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise_and_delta(name) -> None:
    here = epsilon(name, 1.5, 0.05, 100)
    assert here > epsilon(name, 1.5, 0.05, 50)
    assert here > epsilon(name, 1.5, 0.04, 100)
    assert here > epsilon(name, 1.6, 0.05, 100)
    assert here > epsilon(name, 1.5, 0.05, 100, delta=1e-4)


def test_two_phases_compose() -> None:
    ledgers = {name: create_accountant(name) for name in ACCOUNTANTS}
    for ledger in ledgers.values():
        for noise, rate, steps in ((1.0, 0.01, 300), (2.0, 0.02, 200)):
            for _ in range(steps):
                ledger.step(noise_multiplier=noise, sample_rate=rate)
    prv, pld, rdp = (ledgers[name].get_epsilon(DELTA) for name in ACCOUNTANTS)
    assert prv == pytest.approx(pld, abs=0.02)
    assert rdp > pld
    alone = [epsilon("pld", 1.0, 0.01, 300), epsilon("pld", 2.0, 0.02, 200)]
    assert max(alone) < pld < sum(alone)


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_two_full_batch_phases_against_the_exact_gaussian_mechanism(name) -> None:
    # Without sampling σ₁ and σ₂ compose exactly as one Gaussian of precision 1/σ₁² + 1/σ₂².
    ledger = create_accountant(name)
    ledger.step(noise_multiplier=2.0, sample_rate=1.0)
    ledger.step(noise_multiplier=3.0, sample_rate=1.0)
    exact = exact_gaussian_epsilon(1 / math.sqrt(1 / 4 + 1 / 9))
    assert exact <= ledger.get_epsilon(DELTA) <= exact + (0.3 if name == "rdp" else 0.02)


# --- calibration ------------------------------------------------------------------------------------------------------

PLANS = [(1.0, 1), (1.0, 500), (0.02, 10_000), (SST2["sample_rate"], SST2["steps"]), (1e-4, 5_000), (0.5, 20)]
# A tiny rate takes PLD's many points seconds; its search is the same code.
CALIBRATIONS = [(name, *plan) for name in ACCOUNTANTS for plan in PLANS if (name, plan[0]) != ("pld", 1e-4)]


@pytest.mark.parametrize("target", [0.05, 3.3, 50.0])
@pytest.mark.parametrize(("name", "rate", "steps"), CALIBRATIONS)
def test_calibrated_noise_meets_its_target_from_below(name, target, rate, steps) -> None:
    noise = calibrate_noise(accountant=name, target_epsilon=target, target_delta=DELTA, sample_rate=rate, steps=steps)
    assert target - 0.01 <= epsilon(name, noise, rate, steps) <= target


def test_calibration_asks_the_slow_accountant_only_a_few_times(monkeypatch) -> None:
    slow, asked = accounting.prv_epsilon, []
    monkeypatch.setattr(accounting, "prv_epsilon", lambda *args: asked.append(args) or slow(*args))
    calibrate_noise(accountant="prv", target_epsilon=2.2, target_delta=DELTA, **SST2)
    assert 1 <= len(asked) <= 5


def test_a_small_target_is_met_closely_too() -> None:
    noise = calibrate_noise(accountant="prv", target_epsilon=0.005, target_delta=DELTA, sample_rate=0.01, steps=100)
    assert 0.0049 <= epsilon("prv", noise, 0.01, 100) <= 0.005


def test_an_unreachable_target_is_refused() -> None:
    # 1024 is RDP's largest order: without any divergence left it still certifies no less than ε = 0.0035 at δ = 1e-5.
    with pytest.raises(ConfigurationError, match=r"target_epsilon=0.001 cannot be reached.*accountant='rdp'.*\"prv\""):
        calibrate_noise(accountant="rdp", target_epsilon=0.001, target_delta=DELTA, sample_rate=1.0, steps=1)


def test_a_delta_that_holds_without_noise_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"target_delta=0.001 is no less than the chance 0\.0001"):
        calibrate_noise(accountant="prv", target_epsilon=1.0, target_delta=1e-3, sample_rate=1e-5, steps=10)


def test_a_jump_over_the_target_is_answered_on_the_safe_side() -> None:
    def jumps(noise: float) -> float:
        return 5.0 if noise < 2.0 else 1.0

    noise, reached = calibration._search(jumps, target=3.0, tolerance=0.01, start=1.0)
    assert reached == 1.0
    assert 2.0 <= noise < 2.0001


# --- bad input: each is named -----------------------------------------------------------------------------------------

GOOD = {"accountant": "rdp", "target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 10}


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("accountant", "gdp"),
        *[("target_epsilon", bad) for bad in (0.0, -1.0, math.nan, math.inf, "3", None)],
        *[("target_delta", bad) for bad in (0.0, 1.0, -1e-5, math.nan, None)],
        *[("sample_rate", bad) for bad in (0.0, -0.1, 1.01, math.nan, "0.1")],
        *[("steps", bad) for bad in (0, -1, 2.5, True, None)],
        *[("tolerance", bad) for bad in (0.0, math.nan)],
    ],
)
def test_calibration_names_a_bad_argument(argument, bad) -> None:
    with pytest.raises(ConfigurationError, match=f"{argument}={bad!r}"):
        calibrate_noise(**{**GOOD, argument: bad})


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, None])
def test_a_bad_noise_multiplier_is_named(bad) -> None:
    ledger = create_accountant("rdp")
    with pytest.raises(ConfigurationError, match=f"noise_multiplier={bad!r}"):
        ledger.step(noise_multiplier=bad, sample_rate=0.1)
    with pytest.raises(ConfigurationError, match=f"noise_multiplier={bad!r}"):
        epsilon("rdp", bad)
    assert len(ledger) == 0


@pytest.mark.parametrize("bad", [0.0, 1.0, math.nan])
def test_a_bad_delta_is_named_even_when_nothing_was_spent(bad) -> None:
    with pytest.raises(ConfigurationError, match=f"delta={bad!r}"):
        create_accountant("prv").get_epsilon(bad)


def test_an_unknown_accountant_is_a_value_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"accountant='gdp'.*'prv', 'pld', 'rdp'"):
        create_accountant("gdp")


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_history_merges_equal_neighbours_only() -> None:
    ledger = create_accountant("prv")
    assert (len(ledger), ledger.history, ledger.get_epsilon(DELTA)) == (0, [], 0.0)
    for noise, times in ((1.0, 3), (2.0, 1), (1.0, 2)):
        for _ in range(times):
            ledger.step(noise_multiplier=noise, sample_rate=0.01)
    assert ledger.history == [(1.0, 0.01, 3), (2.0, 0.01, 1), (1.0, 0.01, 2)]
    assert len(ledger) == 6
    assert ledger.mechanism() == "prv"
    assert repr(ledger) == "Accountant('prv', steps=6)"


def test_one_step_without_noise_spends_everything() -> None:
    ledger = create_accountant("rdp")
    for noise in (1.0, 0.0, 1.0):
        ledger.step(noise_multiplier=noise, sample_rate=0.01)
    assert ledger.get_epsilon(DELTA) == math.inf


def test_plain_tuples_from_opacus_code_count() -> None:
    ledger = create_accountant("rdp")
    ledger.history = [(1.0, 0.01, 5)]
    ledger.history.append((1.0, 0.01, 5))
    ledger.step(noise_multiplier=np.float64(1.0), sample_rate=0.01)
    assert ledger.history == [(1.0, 0.01, 5), (1.0, 0.01, 6)]
    assert ledger.get_epsilon(DELTA) == epsilon("rdp", 1.0, 0.01, 11)


def test_asking_again_is_free() -> None:
    ledger = create_accountant("prv")
    ledger.step(noise_multiplier=1.0, sample_rate=0.03)
    first, misses = ledger.get_epsilon(DELTA), accounting.composed_epsilon.cache_info().misses
    assert ledger.get_epsilon(delta=DELTA) == first
    assert accounting.composed_epsilon.cache_info().misses == misses


def test_state_survives_json() -> None:
    ledger, copy = create_accountant("pld"), create_accountant("pld")
    for noise in (1.0, 1.0, 2.0):
        ledger.step(noise_multiplier=noise, sample_rate=0.01)
    state = ledger.state_dict()
    ledger.step(noise_multiplier=3.0, sample_rate=0.01)  # the state is a copy: later steps leave it alone
    copy.load_state_dict(json.loads(json.dumps(state)))
    assert copy.state_dict() == state
    assert copy.history == [(1.0, 0.01, 2), (2.0, 0.01, 1)]
    copy.step(noise_multiplier=3.0, sample_rate=0.01)
    assert copy.get_epsilon(DELTA) == ledger.get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "'mechanism' and 'history', not None"),
        ({}, "'mechanism' and 'history'"),
        ({"mechanism": "prv"}, "'mechanism' and 'history'"),
        ({"mechanism": "rdp", "history": []}, "mechanism='rdp'.*this accountant is 'prv'"),
        ({"mechanism": "prv", "history": None}, "history=None"),
        ({"mechanism": "prv", "history": [3]}, r"history=\[3\]"),
        ({"mechanism": "prv", "history": [[1.0, 0.1]]}, r"history=\[\[1.0, 0.1\]\]"),
        ({"mechanism": "prv", "history": [[-1.0, 0.1, 3]]}, "noise_multiplier=-1.0"),
        ({"mechanism": "prv", "history": [[1.0, 1.5, 3]]}, "sample_rate=1.5"),
        ({"mechanism": "prv", "history": [[1.0, 0.1, 2.5]]}, "steps=2.5"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state, message) -> None:
    ledger = create_accountant("prv")
    ledger.step(noise_multiplier=1.0, sample_rate=0.01)
    with pytest.raises(ConfigurationError, match=message):
        ledger.load_state_dict(state)
    assert ledger.history == [(1.0, 0.01, 1)]


def test_accounting_itself_imports_nothing_heavy() -> None:
    code = (
        "import sys, types; package = types.ModuleType('lsg'); package.__path__ = [sys.argv[1]]; "
        "sys.modules['lsg'] = package; import lsg.accounting.epsilon; "
        "print([name for name in ('torch', 'opacus', 'scipy', 'dp_accounting') if name in sys.modules])"
    )
    folder = str(Path(accounting.__file__).parents[1])
    shown = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
