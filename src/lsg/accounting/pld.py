"""Phases and δ in, ε out, by privacy loss distributions."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsg.accounting.compositions import Compositions
from lsg.accounting.libraries import quiet
from lsg.accounting.phases import Phase

_LARGEST_GRID = 2**18  # points of one step's distribution: a slower Python loop than PRV's grid, about a second of work
_FINEST_INTERVAL = 1e-5  # below it the library's differences of δ lose their digits


def pld_epsilon(phases: tuple[Phase, ...], delta: float, round_off: float, loose: float) -> float:
    """ε by dp-accounting's privacy loss distributions, pessimistically discretised, the worse of add and remove."""
    with quiet():
        # The library's 1e-4, finer where many steps share a small ε, coarser where large losses would take minutes.
        total = sum(phase.steps for phase in phases)
        least = min(phase.noise_multiplier for phase in phases)
        widest = 10 / least + 0.5 / least**2
        fine = min(1e-4, loose / (10 * math.sqrt(total)))
        interval = max(fine, _FINEST_INTERVAL, 1e-5 * loose, widest / _LARGEST_GRID)
        if len(phases) == 1:
            distribution = _with_phase(None, phases[0], interval)
        else:  # one of few intervals, so that a history keeps its own while it grows
            interval = _FINEST_INTERVAL * 2.0 ** math.floor(math.log2(interval / _FINEST_INTERVAL))
            distribution = _compositions.of(phases, interval)
        # The δ asked for is a thousandth smaller as well: a single step comes out exact to the last digit or below it.
        return float(distribution.get_epsilon_for_delta(delta * 0.999 - round_off))


def _with_phase(distribution: Any, phase: Phase, interval: float) -> Any:
    """The distribution of further steps."""
    from dp_accounting.pld.privacy_loss_distribution import identity

    steps = _one_step(phase.noise_multiplier, phase.sample_rate, interval)
    if distribution is None:
        return identity(interval).compose(steps.self_compose(phase.steps))
    return distribution.compose(steps.self_compose(phase.steps) if phase.steps > 1 else steps)


_compositions: Compositions[float, Any] = Compositions(_with_phase)


@lru_cache(maxsize=4)
def _one_step(noise: float, rate: float, interval: float) -> Any:
    """dp-accounting's distribution of one step. It finds outputs of given losses one by one, here an array does."""
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    masses = []
    for adjacency in (AdjacencyType.REMOVE, AdjacencyType.ADD)[: 1 if rate == 1 else 2]:
        loss = GaussianPrivacyLoss(noise, sampling_prob=rate, adjacency_type=adjacency)
        bounds = loss.connect_dots_bounds()
        lowest, highest = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
        sign = 1 if adjacency == AdjacencyType.REMOVE else -1
        deltas = _deltas(loss, noise, rate, sign, np.arange(lowest, highest + 1) * interval)
        masses.append(create_pmf_pessimistic_connect_dots_fixed_gap(interval, lowest, highest, deltas))
    return PrivacyLossDistribution(*masses)


def _deltas(loss: Any, noise: float, rate: float, sign: int, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """δ of one step at each ε. sign: 1 for a removed record, -1 for an added one; sign · loss lies above log(1 - q)."""
    least = math.log1p(-rate) if rate < 1 else -math.inf
    found = sign * epsilons > least
    deltas = -np.expm1(epsilons) if sign > 0 else np.zeros(len(epsilons))
    losses = epsilons[found]
    outputs = -0.5 - _unsampled(sign * losses, rate, least) * sign * noise**2 + (sign < 0)
    deltas[found] = loss.mu_upper_cdf(outputs) - np.exp(losses + loss.mu_lower_log_cdf(outputs))
    return np.clip(deltas, 0, 1)


def _unsampled(losses: NDArray[np.float64], rate: float, least: float) -> NDArray[np.float64]:
    """The loss of the same output at rate 1: the x of e^loss = 1 - q + q eˣ."""
    if rate == 1:
        return losses
    raised = losses + np.log(1 / rate)
    x = raised + np.log1p(-np.exp(np.log(1 / rate - 1) - raised))
    x[losses == 0] = 0.0
    x[np.isclose(losses, least, rtol=1e-9, atol=0)] = -math.inf
    return x
