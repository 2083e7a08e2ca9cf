"""Histories of many noises and rates: against exact composition, earlier releases and Opacus; kept compositions."""

import json
import math
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from lsg.accounting import create_accountant, phases, pld, prv, rdp
from lsg.accounting import epsilon as accounting
from lsg.accounting.compositions import Compositions
from lsg.accounting.epsilon import ACCOUNTANTS, composed_epsilon
from lsg.accounting.libraries import quiet
from lsg.accounting.phases import Phase, composed, costliest_steps, fewer_kinds
from lsg.accounting.rdp import ORDERS, step_divergences
from tests.accounting.test_epsilon import exact_gaussian_epsilon

DELTA = 1e-5
DECAY = [(float(noise), 0.01, 1) for noise in np.linspace(2.0, 1.0, 150)]
# (history, δ, ε by PRV that composed the whole history at once, on a grid of its own, in the release before).
EARLIER = [
    ([(1.0, 0.01, 300), (2.0, 0.02, 200)], 1e-5, 1.2111354225559998),
    ([(1.0, 0.01, 300), (2.0, 0.02, 200)], 1e-8, 1.9825635500929544),
    ([(float(noise), 0.01, 20) for noise in np.linspace(2, 1, 10)], 1e-5, 0.5765128773713576),
    ([(1.1, float(rate), 5) for rate in np.linspace(0.005, 0.05, 10)], 1e-8, 2.574855079227694),
    ([(0.3, 0.01, 1), (0.5, 0.02, 3), (1.0, 0.05, 10)], 1e-5, 10.64673270866766),
    ([(20.0, 0.3, 10), (100.0, 0.5, 7), (1000.0, 1.0, 3)], 1e-5, 0.16208909964327436),
    ([(0.6, 0.001, 100), (50.0, 1.0, 5), (2.0, 0.1, 30)], 1e-8, 2.9746015927611316),
    ([(1.0, 0.001, 20000), (1.2, 0.0015, 20000)], 1e-5, 1.0832147036716275),
    (DECAY, 1e-5, 0.4796132672462005),
]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    for cached in (composed_epsilon, rdp.rdp_epsilon, rdp.rdp_curve, prv._one_step, pld._one_step):
        cached.cache_clear()
    for compositions in (prv._compositions, pld._compositions):
        compositions._kept.clear()


def epsilon(name: str, history: list[tuple[float, float, int]], delta: float = DELTA) -> float:
    return composed_epsilon(name, composed(history), delta)


# --- the same ε -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("history", "delta", "earlier"), EARLIER)
def test_prv_is_what_it_was(history, delta, earlier) -> None:
    # Both are upper bounds, by an allowed error of 0.01; the grid's own part of it is far smaller.
    assert epsilon("prv", history, delta) == pytest.approx(earlier, rel=1e-4)


@pytest.mark.filterwarnings("ignore")  # Opacus
@pytest.mark.parametrize("history", [DECAY[:12], [(1.5, 0.02, 7), (0.9, 0.004, 3), (4.0, 0.3, 2)]])
def test_prv_lies_within_opacus_error_bounds(history) -> None:
    from opacus.accountants import PRVAccountant

    peer = PRVAccountant()
    peer.history = history
    lower, _, upper = peer._get_dprv(eps_error=0.002, delta_error=DELTA / 1000).compute_epsilon(
        DELTA, DELTA / 1000, 0.002
    )
    assert lower <= epsilon("prv", history) <= upper + 0.012


@pytest.mark.parametrize("name", ACCOUNTANTS)
@pytest.mark.parametrize("noises", [(0.8, 40.0), (3.0, 5.0, 9.0), tuple(np.linspace(20, 30, 25)), (0.3, 0.5)])
def test_without_sampling_the_exact_gaussian_mechanism_is_never_undercut(name, noises) -> None:
    # Without sampling noises compose exactly, as one Gaussian of precision Σ 1/σ².
    exact = exact_gaussian_epsilon(1 / math.sqrt(sum(1 / noise**2 for noise in noises)))
    spent = epsilon(name, [(float(noise), 1.0, 1) for noise in noises])
    assert exact <= spent <= 1.35 * exact if name == "rdp" else exact <= spent <= exact + max(0.015, 0.003 * exact)


def test_pld_and_prv_agree() -> None:
    history = [(float(noise), 0.01 + 0.002 * (number % 3), 2) for number, noise in enumerate(np.linspace(2, 1.2, 12))]
    assert epsilon("prv", history) == pytest.approx(epsilon("pld", history), abs=0.02)


@pytest.mark.parametrize(("noise", "rate"), [(0.5, 0.5), (0.878, 0.03), (1.37, 0.013), (9.85, 0.9), (100.0, 1e-6)])
def test_divergences_are_dp_accountings(noise, rate) -> None:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    with quiet():
        peer = RdpAccountant(list(ORDERS), dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        peer.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)))
        np.testing.assert_allclose(step_divergences(noise, rate), peer.rdp, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(("noise", "rate"), [(0.878, 0.03), (2.0, 0.5), (1.5, 1.0)])
def test_distributions_are_dp_accountings(noise, rate) -> None:
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    with quiet():
        ours = pld._one_step(noise, rate, 1e-3)
        peer = from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=1e-3)
        for delta in (1e-2, 1e-6, 1e-10):
            assert ours.get_epsilon_for_delta(delta) == pytest.approx(peer.get_epsilon_for_delta(delta), rel=1e-9)


# --- however it came about --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_a_history_step_by_step_and_one_from_a_file_have_the_same_epsilon(name) -> None:
    ledger = create_accountant(name)
    for number in range(24):  # noises come again, and rates change
        ledger.step(noise_multiplier=1.0 + (number % 7) / 4, sample_rate=0.01 * (1 + number % 2))
        ledger.get_epsilon(DELTA)
    state = json.loads(json.dumps(ledger.state_dict()))
    forget()
    loaded = create_accountant(name)
    loaded.load_state_dict(state)
    assert loaded.get_epsilon(DELTA) == ledger.get_epsilon(DELTA)
    forget()
    loaded.history.reverse()
    assert loaded.get_epsilon(DELTA) == ledger.get_epsilon(DELTA)


@pytest.mark.parametrize("name", ["prv", "rdp"])
def test_epsilon_never_falls_while_a_history_grows(name) -> None:
    ledger, spent = create_accountant(name), [0.0]
    for number in range(80):
        noise, rate = 0.8 + 4 * abs(math.sin(number)), 0.001 * (1 + number % 5)
        after = ledger.epsilon_after(Phase(noise, rate, 1), DELTA)
        ledger.step(noise_multiplier=noise, sample_rate=rate)
        spent.append(ledger.get_epsilon(DELTA))
        assert after == spent[-1]
    # A step that costs next to nothing is less than PRV's grid resolves, which is far less than the error it adds.
    resolved = 0.9995 if name == "prv" else 1.0
    assert all(later >= resolved * earlier for earlier, later in pairwise(spent))


@pytest.mark.parametrize("name", ["prv", "rdp"])
def test_less_noise_or_a_higher_rate_in_one_phase_costs_more(name) -> None:
    history = [(1.5, 0.01, 50), (2.0, 0.02, 50), (3.0, 0.03, 50)]
    here = epsilon(name, history)
    assert epsilon(name, [(1.5, 0.01, 50), (1.95, 0.02, 50), (3.0, 0.03, 50)]) > here
    assert epsilon(name, [(1.5, 0.01, 50), (2.0, 0.021, 50), (3.0, 0.03, 50)]) > here
    assert epsilon(name, [(1.5, 0.01, 50), (2.0, 0.02, 51), (3.0, 0.03, 50)]) > here


def test_one_step_without_noise_among_many_spends_everything() -> None:
    assert epsilon("prv", [*DECAY, (0.0, 0.01, 1)]) == math.inf


# --- very many kinds of steps -----------------------------------------------------------------------------------------


def test_rounded_kinds_have_less_noise_and_higher_rates(monkeypatch) -> None:
    monkeypatch.setattr(phases, "_MOST_KINDS", 0)
    for noise in (1e-3, 0.5, 1.0, 1.005, 1.005**7, 3.0, 1e6):
        for rate in (1e-7, 0.01, 1.005**-3, 0.999, 1.0):
            [rounded] = fewer_kinds((Phase(noise, rate, 3),))
            assert noise / 1.0051 < rounded.noise_multiplier <= noise
            assert rate <= rounded.sample_rate <= min(1.0, rate * 1.0051)
            assert rounded.steps == 3


def test_the_costliest_steps_cost_as_much_as_any() -> None:
    kinds = [Phase(2.0, 0.1, 9), Phase(1.0, 0.05, 4), Phase(1.0, 0.01, 4), Phase(3.0, 0.1, 1), Phase(4.0, 0.3, 1)]
    assert costliest_steps(kinds) == [(1.0, 0.05, 1), (2.0, 0.1, 1), (4.0, 0.3, 1)]
    of_any = max(epsilon("rdp", [phase._replace(steps=1)]) for phase in kinds)
    assert max(epsilon("rdp", [step]) for step in costliest_steps(kinds)) == of_any


def test_rounded_kinds_cost_no_less_and_little_more(monkeypatch) -> None:
    history = composed([(float(noise), 0.01, 1) for noise in np.linspace(2.0, 1.5, 300)])
    rounded = epsilon("prv", history)
    assert len(fewer_kinds(history)) < 80
    forget()
    monkeypatch.setattr(phases, "_MOST_KINDS", 1000)
    assert 1.0 <= rounded / epsilon("prv", history) < 1.006


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_longer_history_begins_with_the_longest_that_it_contains() -> None:
    added = []

    def extend(before: int | None, phase: Phase, grid: str) -> int:
        added.append(phase)
        return (before or 0) + phase.steps

    compositions = Compositions(extend)
    a, b, c = Phase(1.0, 0.1, 5), Phase(2.0, 0.1, 5), Phase(3.0, 0.1, 1)
    assert compositions.of((a, b), "grid") == 10 and added == [a, b]
    assert compositions.of((a, b, c), "grid") == 11 and added[2:] == [c]
    assert compositions.of((a, b._replace(steps=7), c), "grid") == 13 and added[3:] == [b._replace(steps=2)]
    assert compositions.of((a, b), "grid") == 10 and len(added) == 4  # a shorter one is still there
    assert compositions.of((a, b), "grid") == 10 and len(added) == 4 and len(compositions._kept) == 3
    assert compositions.of((a, b), "other") == 10 and added[4:] == [a, b]  # another grid begins anew
    assert compositions.of((a, b), "grid") == 10 and len(added) == 6
    assert compositions.of((a, b._replace(steps=4)), "grid") == 9 and len(added) == 8  # so does what contains none


def test_a_new_noise_costs_one_discretised_step(monkeypatch) -> None:
    ledger, made = create_accountant("prv"), []
    plain = prv._one_step
    for noise, rate, _ in DECAY[:40]:
        ledger.step(noise_multiplier=noise, sample_rate=rate)
    ledger.get_epsilon(DELTA)
    monkeypatch.setattr(prv, "_one_step", lambda *kind: made.append(kind) or plain(*kind))
    ledger.step(noise_multiplier=DECAY[40][0], sample_rate=0.01)
    ledger.get_epsilon(DELTA)
    ledger.get_epsilon(DELTA)
    assert len(made) == 1


def test_a_schedule_of_150_noises_takes_no_time() -> None:
    """0.4 s cold and 10 ms a step on one core of 2026; the ceilings leave room for busy machines."""
    epsilon("prv", [(1.3, 0.02, 1), (1.4, 0.02, 1)])  # libraries are imported
    forget()
    began = time.perf_counter()
    epsilon("prv", DECAY)
    assert time.perf_counter() - began < 3.0
    assert accounting.composed_epsilon.cache_info().currsize == 1
    ledger, waited = create_accountant("prv"), []
    ledger.history = list(DECAY)
    for number in range(20):
        ledger.step(noise_multiplier=0.99 - 0.001 * number, sample_rate=0.01)
        began = time.perf_counter()
        ledger.get_epsilon(DELTA)
        waited.append(time.perf_counter() - began)
    assert sorted(waited)[10] < 0.2
