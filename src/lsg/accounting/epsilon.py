"""(noise multiplier, sample rate, steps) in, ε at a given δ out, and back from a target ε to a noise multiplier.

Neighbouring data sets differ by one added or removed record, batches are Poisson samples, and each step is a Gaussian
mechanism of sensitivity 1. Every ε returned is an upper bound: where a method's numerics cannot be trusted the next,
looser and sturdier one answers (PRV, then PLD, then RDP).
"""

import contextlib
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from lsg.errors import ConfigurationError

ACCOUNTANTS = ("prv", "pld", "rdp")

# Composition by FFT leaves an error in δ that grows with the number of steps: 1e-16 a step was the most measured (PRV
# and PLD, 1 to 1e6 steps, in tails whose true mass is known to vanish). Ten times that is taken off δ to be safe.
_ROUND_OFF_PER_STEP = 1e-15
# Past this ε nobody needs a tight value, while the FFT's grids grow without bound: RDP answers alone.
_LARGEST_FFT_EPSILON = 1000.0
# Past this many steps the FFTs take minutes and their round-off counts: RDP answers alone there too.
_LARGEST_FFT_STEPS = 3_000_000
# Points of the PRV grid, and of one step's PLD (a slower Python loop): about a second of work each. A run that would
# need more pays with a somewhat larger ε instead of more time.
_LARGEST_PRV_GRID, _LARGEST_PLD_GRID = 2**21, 2**18
# How a method may fail numerically; the next, sturdier method then answers.
_NUMERICAL_FAILURES = (ArithmeticError, ValueError, RuntimeError, IndexError, MemoryError)

_SMALLEST_NOISE, _LARGEST_NOISE = 1e-3, 1e7


class Phase(NamedTuple):
    """Consecutive steps that share one noise multiplier and one sample rate. Equal to the plain tuple Opacus keeps."""

    noise_multiplier: float
    sample_rate: float
    steps: int


class Accountant:
    """What has been spent so far, and the ε it amounts to. Reads and steps as an Opacus accountant does.

    name: "prv" (as the paper), "pld" or "rdp".
    history: the phases so far, oldest first; `step` merges equal neighbours.
    """

    def __init__(self, name: str) -> None:
        self.name = _known(name)
        self.history: list[Phase] = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one step of the mechanism. Call it before the noisy result is released."""
        new = _checked_phase(noise_multiplier, sample_rate, 1)
        if self.history and tuple(self.history[-1][:2]) == new[:2]:
            new = new._replace(steps=self.history.pop()[2] + 1)
        self.history.append(new)

    def get_epsilon(self, delta: float) -> float:
        """An upper bound of ε at `delta`: 0 before the first step, infinite if any step had no noise."""
        return _epsilon(self.name, _composed(self.history), _checked_delta("delta", delta))

    def mechanism(self) -> str:
        """The accountant's name, as Opacus spells it."""
        return self.name

    def __len__(self) -> int:
        return sum(steps for _, _, steps in self.history)

    def __repr__(self) -> str:
        return f"Accountant({self.name!r}, steps={len(self)})"

    def state_dict(self) -> dict[str, Any]:
        """Everything spent, as plain JSON values."""
        return {"mechanism": self.name, "history": [list(phase) for phase in self.history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the history by a saved one. A state of another mechanism, or a malformed one, changes nothing."""
        if not isinstance(state, Mapping) or not {"mechanism", "history"} <= state.keys():
            raise ConfigurationError(
                f"accountant state must be a mapping with 'mechanism' and 'history', not {state!r}: "
                "pass what Accountant.state_dict() returned"
            )
        if state["mechanism"] != self.name:
            raise ConfigurationError(
                f"accountant state has mechanism={state['mechanism']!r}, but this accountant is {self.name!r}: "
                f"make the engine with accountant={state['mechanism']!r} to continue that run"
            )
        self.history = _checked_history(state["history"])


def create_accountant(name: str) -> Accountant:
    """A fresh accountant that has spent nothing. name: "prv", "pld" or "rdp"."""
    return Accountant(name)


def epsilon_of(*, accountant: str, noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """An upper bound of the ε that `steps` equal steps spend at `delta`. Zero steps spend nothing."""
    name, delta = _known(accountant), _checked_delta("delta", delta)
    return _epsilon(name, _composed([_checked_phase(noise_multiplier, sample_rate, steps)]), delta)


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
    name, delta = _known(accountant), _checked_delta("target_delta", target_delta)
    for label, value in (("target_epsilon", target_epsilon), ("tolerance", tolerance)):
        if not _is_real(value) or not 0 < value < math.inf:
            raise ConfigurationError(f"{label}={value!r} must be a finite number above 0")
    _, rate, count = _checked_phase(1.0, sample_rate, steps)
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
        return lambda noise: _epsilon(method, (Phase(noise, rate, count),), delta)

    # RDP is cheap and within some 10 % of the others, so it brings the search close before they are asked at all.
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


# --- ε of a composed history, by each method --------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _epsilon(name: str, phases: tuple[Phase, ...], delta: float) -> float:
    """ε by the named method, or by the next sturdier one where its numerics fail. Never below the truth."""
    if not phases:
        return 0.0
    if any(phase.noise_multiplier == 0 for phase in phases):
        return math.inf
    loose = _rdp(phases, delta)
    steps = sum(phase.steps for phase in phases)
    round_off = _ROUND_OFF_PER_STEP * (steps + 100)
    beyond_fft = loose > _LARGEST_FFT_EPSILON or steps > _LARGEST_FFT_STEPS or round_off > delta / 2
    if name == "rdp" or loose == 0 or beyond_fft:
        return loose
    for method in (_prv, _pld) if name == "prv" else (_pld,):
        with contextlib.suppress(*_NUMERICAL_FAILURES):
            epsilon = method(phases, delta, round_off, loose)
            if 0 <= epsilon < math.inf:
                return epsilon
    return loose


def _prv(phases: tuple[Phase, ...], delta: float, round_off: float, loose: float) -> float:
    """ε by Gopi et al. 2021 with Opacus's privacy random variables: their estimate plus its error bounds.

    Opacus's own accountant is put together anew here for three reasons: its grid has no largest size, its allowed error
    is the same 0.01 for ε = 0.05 and ε = 500, and it integrates the mean of a step with an error near 4e-10, of which
    a million steps keep 4e-4. The variable bounds δ for a removed record; for the Poisson-sampled Gaussian that is the
    worse direction (PLD, which computes both, agreed at each of 328 settings compared).
    """
    with _quiet():
        import numpy as np
        from opacus.accountants.analysis.prv import (
            DiscretePRV,
            Domain,
            PoissonSubsampledGaussianPRV,
            compose_heterogeneous,
        )
        from scipy.fft import next_fast_len

        counts = [phase.steps for phase in phases]
        total, delta_error = sum(counts), delta / 1000
        # Remark 5.6 of Gopi et al.: losses beyond ±reach have too little mass to matter, composed or alone.
        alone = max(_rdp((phase._replace(steps=1),), delta_error / (8 * total)) for phase in phases)
        reach = max(_rdp(phases, delta_error / 4), alone) + 3
        # 1 % of a small ε, 0.01 from 1 to 10, 0.1 % of a large one; more where the grid would grow too large.
        wanted = max(0.01 * min(loose, 1.0), 0.001 * loose)
        spread = math.sqrt(total * math.log(12 / delta_error) / 2)
        mesh = max(wanted / spread, 2 * reach / _LARGEST_PRV_GRID)
        eps_error = mesh * spread

        half = next_fast_len(math.ceil(reach / mesh) + 1)
        domain = Domain(t_min=-(half - 1) * mesh, t_max=half * mesh, size=2 * half)
        edges = np.linspace(domain.t_min - mesh / 2, domain.t_max + mesh / 2, domain.size + 1)
        steps = []
        for noise, rate, _ in phases:
            mass = np.diff(PoissonSubsampledGaussianPRV(rate, noise).cdf(edges))
            mass /= mass.sum()
            shift = _mean_loss(noise, rate) - float(np.dot(domain.ts, mass))
            if not abs(shift) < mesh / 2:
                raise ArithmeticError("the grid's mean strays from the true mean by half a cell or more")
            steps.append(DiscretePRV(pmf=mass, domain=domain.shift_right(shift)))
        composed = compose_heterogeneous(dprvs=steps, num_self_compositions=counts)
        if not abs(float(composed.pmf.sum()) - 1) < 1e-6:
            raise ArithmeticError("the composed masses do not add up to 1")
        _, _, upper = composed.compute_epsilon(delta, delta_error + round_off, eps_error)
        return max(float(upper), 0.0) if math.isfinite(upper) else math.inf


def _mean_loss(noise: float, rate: float) -> float:
    """Mean privacy loss of one step, KL(P‖N(0,σ²)) with P = (1−q)·N(0,σ²) + q·N(1,σ²), to rounding error."""
    import numpy as np

    if rate == 1:
        return 1 / (2 * noise**2)
    # The trapezoid rule on a Gaussian integrand converges faster than any power of the spacing.
    x = np.linspace(-12 * noise, 1 + 12 * noise, 20001)
    exponent = (2 * x - 1) / (2 * noise**2)
    near = np.log1p(rate * np.expm1(np.clip(exponent, -50, 50)))  # exact where the loss is as small as the rate
    loss = np.where(np.abs(exponent) < 50, near, np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))
    weight = (1 - rate) * np.exp(-(x**2) / (2 * noise**2)) + rate * np.exp(-((x - 1) ** 2) / (2 * noise**2))
    return float(np.dot(weight, loss) / weight.sum())


def _pld(phases: tuple[Phase, ...], delta: float, round_off: float, loose: float) -> float:
    """ε by dp-accounting's privacy loss distributions, pessimistically discretised, the worse of add and remove."""
    with _quiet():
        import dp_accounting
        from dp_accounting.pld import PLDAccountant

        # The library's 1e-4, finer where many steps share a small ε, coarser where large losses would take minutes.
        # Below 1e-5 its differences of δ lose their digits.
        total = sum(phase.steps for phase in phases)
        widest = max(10 / phase.noise_multiplier + 0.5 / phase.noise_multiplier**2 for phase in phases)
        fine = min(1e-4, loose / (10 * math.sqrt(total)))
        interval = max(fine, 1e-5, 1e-5 * loose, widest / _LARGEST_PLD_GRID)
        accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, interval)
        for phase in phases:
            accountant.compose(_event(phase), phase.steps)
        # The δ asked for is a thousandth smaller as well: a single step comes out exact to the last digit or below it.
        return float(accountant.get_epsilon(delta * 0.999 - round_off))


@lru_cache(maxsize=4096)
def _rdp(phases: tuple[Phase, ...], delta: float) -> float:
    """ε by dp-accounting's Rényi accountant: it goes to higher orders than Opacus's and its series always end."""
    with _quiet():
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant

        orders = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024]
        accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        try:
            for phase in phases:
                accountant.compose(_event(phase), phase.steps)
            epsilon = float(accountant.get_epsilon(delta))
        except _NUMERICAL_FAILURES:
            return math.inf
        # A divergence that rounds to zero or below makes the library answer 0. No order certifies less than this one
        # does without any divergence, so nothing below it is believed.
        floor = math.log1p(-1 / orders[-1]) - math.log(delta * orders[-1]) / (orders[-1] - 1)
        return max(epsilon, floor, 0.0) if not math.isnan(epsilon) else math.inf


def _event(phase: Phase) -> Any:
    """One step of a phase, as dp-accounting describes it."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(phase.noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(phase.sample_rate, gaussian)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries: overflow in a tail and orders left out are expected, and their results are checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import numpy as np
        from absl import logging

        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)
        try:
            with np.errstate(all="ignore"):
                yield
        finally:
            logging.set_verbosity(verbosity)


# --- checks -----------------------------------------------------------------------------------------------------------


def _composed(history: Sequence[tuple[float, float, int]]) -> tuple[Phase, ...]:
    """The history with equal phases added up, in a fixed order: composition does not care, and the caches do."""
    totals: dict[tuple[float, float], int] = {}
    for noise, rate, steps in _checked_history(history):
        totals[noise, rate] = totals.get((noise, rate), 0) + steps
    return tuple(Phase(noise, rate, steps) for (noise, rate), steps in sorted(totals.items()) if steps)


def _checked_history(history: Iterable[Iterable[Any]]) -> list[Phase]:
    try:
        rows = [tuple(row) for row in history]
    except TypeError:
        rows = [()]
    if any(len(row) != 3 for row in rows):
        raise ConfigurationError(
            f"history={history!r} must be a list of (noise_multiplier, sample_rate, steps): "
            "pass what Accountant.state_dict() returned"
        )
    return [_checked_phase(*row) for row in rows]


def _checked_phase(noise_multiplier: float, sample_rate: float, steps: int) -> Phase:
    if not _is_real(noise_multiplier) or not 0 <= noise_multiplier < math.inf:
        raise ConfigurationError(
            f"noise_multiplier={noise_multiplier!r} must be a finite number, 0 (no privacy) or above"
        )
    if not _is_real(sample_rate) or not 0 < sample_rate <= 1:
        raise ConfigurationError(
            f"sample_rate={sample_rate!r} must be above 0 and at most 1: it is batch size / number of records"
        )
    if not _is_whole(steps) or steps < 0:
        raise ConfigurationError(f"steps={steps!r} must be a whole number, 0 or above")
    return Phase(float(noise_multiplier), float(sample_rate), int(steps))


def _checked_delta(label: str, delta: float) -> float:
    if not _is_real(delta) or not 0 < delta < 1:
        raise ConfigurationError(
            f"{label}={delta!r} must lie strictly between 0 and 1: choose it well below one over the number of records"
        )
    return float(delta)


def _known(name: str) -> str:
    if name not in ACCOUNTANTS:
        raise ConfigurationError(f"accountant={name!r} is not known: use one of {', '.join(map(repr, ACCOUNTANTS))}")
    return name


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
