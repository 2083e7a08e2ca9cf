"""Phases and δ in, ε out, by privacy random variables: the tightest of the three accountants, and the paper's."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lsg.accounting.compositions import Compositions
from lsg.accounting.libraries import quiet
from lsg.accounting.phases import Phase, costliest_steps
from lsg.accounting.prv_loss import Domain, loss_distribution, upper_epsilon
from lsg.accounting.rdp import rdp_epsilon

# Points of the grid, about a second of work. A run that would need more pays with a somewhat larger ε instead of more
# time.
_LARGEST_GRID = 2**21


class _Grid(NamedTuple):
    """Losses from -(half - 1) to half times the mesh."""

    mesh: float
    half: int

    def domain(self) -> Domain:
        return Domain(t_min=-(self.half - 1) * self.mesh, t_max=self.half * self.mesh, size=2 * self.half)


class _Loss(NamedTuple):
    """The privacy loss of so many steps: the Fourier transform of its masses, and the grid moved to its mean."""

    transform: NDArray[np.complex128]
    domain: Domain
    steps: int

    def masses(self) -> NDArray[np.float64]:
        from scipy.fft import irfft

        # A step's losses are counted from the grid's first point, so the sum of several lies that much further right.
        return np.roll(irfft(self.transform), -(self.steps - 1) * (self.domain.size // 2 - 1))


def prv_epsilon(phases: tuple[Phase, ...], delta: float, round_off: float, loose: float) -> float:
    """ε by Gopi et al. 2021 with Opacus's privacy random variable: its estimate plus its error bounds.

    Opacus's own accountant is put together anew here for four reasons: its grid has no largest size, its allowed error
    is the same 0.01 for ε = 0.05 and ε = 500, it integrates the mean of a step with an error near 4e-10, of which
    a million steps keep 4e-4, and it composes the whole history anew for each answer. The variable bounds δ for a
    removed record; for the Poisson-sampled Gaussian that is the worse direction (PLD, which computes both, agreed at
    each of 328 settings compared).
    """
    with quiet():
        total, delta_error = sum(phase.steps for phase in phases), delta / 1000
        # Remark 5.6 of Gopi et al.: losses beyond ±reach have too little mass to matter, composed or alone.
        alone = max(rdp_epsilon((step,), delta_error / (8 * total)) for step in costliest_steps(phases))
        reach = max(rdp_epsilon(phases, delta_error / 4), alone) + 3
        # 1 % of a small ε, 0.01 from 1 to 10, 0.1 % of a large one; more where the grid would grow too large.
        wanted = max(0.01 * min(loose, 1.0), 0.001 * loose)
        spread = math.sqrt(total * math.log(12 / delta_error) / 2)
        if len(phases) == 1:
            grid = _fitting_grid(wanted / spread, reach)
            loss = _with_phase(None, phases[0], grid)
        else:
            grid = _shared_grid(wanted / spread, reach)
            loss = _compositions.of(phases, grid)
        masses = loss.masses()
        if not abs(float(masses.sum()) - 1) < 1e-6:
            raise ArithmeticError("the composed masses do not add up to 1")
        # A shared grid is finer than wanted. Its error counts as the wanted one, so that ε does not fall where the grid
        # becomes finer.
        eps_error = max(wanted / spread, grid.mesh) * spread
        upper = upper_epsilon(masses, loss.domain, delta, delta_error + round_off, eps_error)
        return max(upper, 0.0) if math.isfinite(upper) else math.inf


def _fitting_grid(mesh: float, reach: float) -> _Grid:
    """The smallest grid of that mesh and reach."""
    from scipy.fft import next_fast_len

    mesh = max(mesh, 2 * reach / _LARGEST_GRID)
    return _Grid(mesh, next_fast_len(math.ceil(reach / mesh) + 1))


def _shared_grid(mesh: float, reach: float) -> _Grid:
    """One of few grids, no coarser and no shorter, so that a history stays on its grid while it grows."""
    mesh = max(2.0 ** math.floor(math.log2(mesh)), 2.0 ** math.ceil(math.log2(2 * reach / _LARGEST_GRID)))
    least = math.ceil(reach / mesh) + 1
    power = 2 ** math.ceil(math.log2(least))
    return _Grid(mesh, 3 * power // 4 if 3 * power // 4 >= least else power)


def _with_phase(loss: _Loss | None, phase: Phase, grid: _Grid) -> _Loss:
    """The loss of further steps, composed on the grid as on a circle (Gopi et al., algorithm 1)."""
    transform, domain = _one_step(phase.noise_multiplier, phase.sample_rate, grid)
    if phase.steps > 1:
        transform, domain = transform**phase.steps, domain.shift_right(domain.shifts * (phase.steps - 1))
    if loss is None:
        return _Loss(transform, domain, phase.steps)
    return _Loss(loss.transform * transform, loss.domain.shift_right(domain.shifts), loss.steps + phase.steps)


_compositions = Compositions(_with_phase)


@lru_cache(maxsize=2)
def _one_step(noise: float, rate: float, grid: _Grid) -> tuple[NDArray[np.complex128], Domain]:
    """The transform of one step's masses, and the grid moved so that their mean is the true one."""
    from scipy.fft import rfft

    domain = grid.domain()
    edges = np.linspace(domain.t_min - grid.mesh / 2, domain.t_max + grid.mesh / 2, domain.size + 1)
    # Outside of these two the distribution function is 0 or 1, to the last digit.
    low, high = np.searchsorted(edges, (math.log1p(-rate) if rate < 1 else -math.inf, _largest_loss(noise, rate)))
    cumulated = np.zeros(len(edges))
    cumulated[low:high] = loss_distribution(edges[low:high], rate, noise)
    cumulated[high:] = 1.0
    masses = np.diff(cumulated)
    masses /= masses.sum()
    shift = _mean_loss(noise, rate) - float(np.dot(domain.ts, masses))
    if not abs(shift) < grid.mesh / 2:
        raise ArithmeticError("the grid's mean strays from the true mean by half a cell or more")
    return rfft(masses), domain.shift_right(shift)


def _largest_loss(noise: float, rate: float) -> float:
    """The loss at an output 10 standard deviations beyond the record's own: less than 1e-23 lies above."""
    exponent = (1 + 20 * noise) / (2 * noise**2)
    return float(np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + exponent))


@lru_cache(maxsize=8192)
def _mean_loss(noise: float, rate: float) -> float:
    """Mean privacy loss of one step, KL(P‖N(0,σ²)) with P = (1−q)·N(0,σ²) + q·N(1,σ²), to rounding error."""
    if rate == 1:
        return 1 / (2 * noise**2)
    # The trapezoid rule on a Gaussian integrand converges faster than any power of the spacing.
    x = np.linspace(-12 * noise, 1 + 12 * noise, 20001)
    exponent = (2 * x - 1) / (2 * noise**2)
    near = np.log1p(rate * np.expm1(np.clip(exponent, -50, 50)))  # exact where the loss is as small as the rate
    loss = np.where(np.abs(exponent) < 50, near, np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))
    weight = (1 - rate) * np.exp(-(x**2) / (2 * noise**2)) + rate * np.exp(-((x - 1) ** 2) / (2 * noise**2))
    return float(np.dot(weight, loss) / weight.sum())
