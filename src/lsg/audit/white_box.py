"""White-box audit: canary records in one step (or many) of the real engine; what is released tells how private it was.

The adversary knows everything but the noise and whether the canary is there: weights, L, R, masks and the other
records. It looks at the gradients given to the optimizer, along the direction in which the canary would move them. That
is telling N(0, s²) from N(C, s²), the very thing that the accountant counts with, so the bound should come close to the
claim, and may not pass it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from lsg.accounting import calibrate_noise
from lsg.audit import canaries
from lsg.audit.bounds import Bounds, Mechanism, lower_bounds
from lsg.audit.canaries import Canary
from lsg.audit.rig import MAX_GRAD_NORM, Record, Rig, blank
from lsg.methods import Method
from lsg.step.clipping import ClippedSum, Clipping

TOLERANCE = 1e-6  # by which rounding may move a clipped sum beyond the bound, as a share of it
SCALES = (1e-6, 1e-3, 1.0, 1e3)  # of the canaries' gradients, for the sensitivity alone
FEWER = 4  # trials of the canaries that look for gross faults, not for a tight bound
BACKGROUND = 3  # other records in the batch
RUN_RECORDS, RUN_RATE = 8, 0.25  # of a run of many steps


@dataclass(frozen=True)
class Sensitivity:
    """How far a canary moves the clipped sum, at most and at the canary's own size, as shares of the threshold C."""

    largest: float
    own: float
    wanted: float  # what the canary's own size must reach, if clipping goes by what is trained and nothing else

    @property
    def too_large(self) -> bool:
        return not self.largest <= 1 + TOLERANCE

    @property
    def wrong(self) -> bool:
        """Private, but not the method that was asked for: too little is left of a gradient."""
        return self.own < self.wanted


@dataclass(frozen=True)
class Observed:
    """What a canary (or a group of like ones) showed.

    noise_p_value: how likely noise as large as claimed comes out as small as it did along the canary; None: no noise is
        expected there.
    """

    canary: str
    sensitivity: Sensitivity
    bounds: Bounds
    noise_p_value: float | None
    absent: np.ndarray  # the statistic: how far along the canary, over the noise's claimed standard deviation
    present: np.ndarray


@dataclass(frozen=True)
class WhiteBox:
    """claimed: what the engine's accountant says of the steps. alpha: false-alarm rate of each single test in here."""

    claimed: float
    noise_multiplier: float
    mechanism: Mechanism
    observed: list[Observed]
    alpha: float

    @property
    def bound(self) -> float:
        return max(o.bounds.epsilon for o in self.observed)

    @property
    def violations(self) -> list[str]:
        found = []
        for o in self.observed:
            if o.sensitivity.too_large:
                found.append(f"canary {o.canary} moves the clipped sum by {o.sensitivity.largest:.4g} times C")
            if o.sensitivity.wrong:
                found.append(
                    f"canary {o.canary} moves the clipped sum by only {o.sensitivity.own:.4g} times C: its norm counts "
                    "entries that are not trained, or clipping is not what was asked for"
                )
            if o.noise_p_value is not None and o.noise_p_value < self.alpha:
                found.append(f"along canary {o.canary} there is less noise than claimed (p = {o.noise_p_value:.1e})")
            if o.bounds.epsilon > self.claimed:
                found.append(f"canary {o.canary} shows epsilon >= {o.bounds.epsilon:.3f}, claimed {self.claimed:.3f}")
        return found


def audit_step(
    method: Method, clipping: Clipping, *, epsilon: float, delta: float, trials: int, seed: int, alpha: float
) -> WhiteBox:
    """One step at sample rate 1, released `trials` times with and without each canary.

    alpha: the rate of false alarms of all tests together.
    """
    mechanism = Mechanism()
    noise_multiplier = _calibrated(mechanism, epsilon, delta)
    background = _background(seed)
    rig = Rig(method, clipping, [*background, blank()], noise_multiplier=noise_multiplier, seed=seed)
    try:
        rig.epoch()  # one real step, for the accountant
        claimed = rig.engine.get_epsilon(delta)
        groups = _groups(rig, method, seed)
        lift = _Lift(rig)
        watched = [_Watched(canary, rig, lift, background) for group in groups for canary in group]
        directions = torch.stack([w.direction for w in watched], dim=1)
        # All sums before the first release: the step that they belong to is over with it, and its subspaces too.
        nothing = rig.clipped([*background, blank()])
        totals = [rig.clipped([*background, *(canary.record for canary in group)]) for group in groups]
        absent = _release_many(rig, nothing, trials, directions)
        present: list[Tensor] = []
        for number, (group, total) in enumerate(zip(groups, totals, strict=True)):
            # All of a group at once: they are orthogonal, so none disturbs another's statistic.
            mine = directions[:, len(present) : len(present) + len(group)]
            present += _release_many(rig, total, trials // FEWER if number else trials, mine).unbind(1)
        tests = _tests(watched, absent.unbind(1), present)
    finally:
        rig.close()
    each = alpha / (2 * len(tests))  # a bound and a test of the noise for each
    observed = [
        Observed(
            name,
            sensitivity,
            lower_bounds(without, with_, mechanism=mechanism, delta=delta, alpha=each),
            _noise_p_value(without) if noisy else None,
            without,
            with_,
        )
        for name, sensitivity, noisy, without, with_ in tests
    ]
    return WhiteBox(claimed, noise_multiplier, mechanism, observed, each)


def audit_run(
    method: Method,
    clipping: Clipping,
    *,
    epsilon: float,
    delta: float,
    steps: int,
    trials: int,
    seed: int,
    alpha: float,
) -> WhiteBox:
    """Whole runs of `steps` steps on the private loader, with and without a canary in the data set.

    The adversary adds up log-likelihood ratios, which no other statistic beats.
    """
    per_epoch = round(1 / RUN_RATE)
    epochs = -(-steps // per_epoch)
    mechanism = Mechanism(RUN_RATE, epochs * per_epoch)
    noise_multiplier = _calibrated(mechanism, epsilon, delta)
    others = [blank()] * (RUN_RECORDS - canaries.TOGETHER)
    probe = Rig(method, clipping, others, noise_multiplier=noise_multiplier, seed=seed)
    chosen, lift = canaries.inside(probe), _Lift(probe)
    watched = [_Watched(canary, probe, lift, others) for canary in chosen]
    probe.close()
    directions = torch.stack([w.direction for w in watched], dim=1)
    shifts = torch.tensor([w.shift for w in watched], dtype=directions.dtype)
    statistics = []
    for is_there in (False, True):
        rig = Rig(
            method,
            clipping,
            others + [canary.record if is_there else blank() for canary in chosen],
            noise_multiplier=noise_multiplier,
            seed=seed,
            noise_seed=2 * seed + is_there,
            sample_rate=RUN_RATE,
        )
        ratios = []
        for run in range(trials):
            seen = torch.stack([step.released for _ in range(epochs) for step in rig.epoch()]) @ directions
            ratios.append(_log_likelihood_ratio(seen, shifts).sum(0))
            if run == 0:
                claimed = rig.engine.get_epsilon(delta)
        rig.close()
        statistics.append(torch.cat(ratios).numpy())
    bounds = lower_bounds(*statistics, mechanism=mechanism, delta=delta, alpha=alpha)
    observed = Observed(f"inside, {mechanism.steps} steps", _worst(watched), bounds, None, *statistics)
    return WhiteBox(claimed, noise_multiplier, mechanism, [observed], alpha)


class _Lift:
    """How a sum becomes gradients, and which sum best explains a gradient."""

    def __init__(self, rig: Rig) -> None:
        self.matrix = rig.lift_matrix()
        self.undo = self.matrix @ torch.linalg.pinv(self.matrix.T @ self.matrix, hermitian=True)


class _Watched:
    """A canary, how it moves the clipped sum, and where to look for it in what is released.

    direction: of a released gradient, scaled so that the claimed noise has standard deviation 1 along it.
    start, shift: where the statistic is without the canary, but for the noise, and how far the canary moves it.
    """

    def __init__(self, canary: Canary, rig: Rig, lift: _Lift, background: list[Record]) -> None:
        self.canary = canary
        base = rig.clipped([*background, blank()]).vector
        change = rig.clipped([*background, canary.record]).vector - base
        scaled = [Record(canary.record.x * scale, canary.record.g) for scale in SCALES]
        changes = [rig.clipped([*background, one]).vector - base for one in scaled]
        norms = [float(c.norm()) / MAX_GRAD_NORM for c in (change, *changes)]
        self.sensitivity = Sensitivity(max(norms), norms[0], canary.reach)
        # The noise sits before the lift A, so the best statistic of y undoes it: c^T A^+ y.
        direction = lift.undo @ change
        if norms[0] < TOLERANCE:  # nothing of it enters: look where its whole gradient would be
            direction = _whole_gradient(rig, canary.record)
        deviation = rig.optimizer.noise_multiplier * MAX_GRAD_NORM * float((lift.matrix.T @ direction).norm())
        self.noisy = deviation > TOLERANCE * float(direction.norm())
        self.direction = direction / deviation if self.noisy else direction
        self.start, self.shift = (float(self.direction @ (lift.matrix @ vector)) for vector in (base, change))


def _groups(rig: Rig, method: Method, seed: int) -> list[list[Canary]]:
    hidden = canaries.outside(rig, method)
    groups = [canaries.inside(rig), [canaries.anywhere(seed)], canaries.in_one_layer(seed)]
    return groups if hidden is None else [*groups, [hidden]]


def _tests(
    watched: list[_Watched], absent: Sequence[Tensor], present: Sequence[Tensor]
) -> list[tuple[str, Sensitivity, bool, np.ndarray, np.ndarray]]:
    """Canary, sensitivity, whether noise is expected, statistics without and with it.

    The ones inside are alike and make one test: in one release each of them is a trial of its own, as the noise along
    orthogonal directions is independent.
    """
    tests = []
    inner = range(canaries.TOGETHER)
    alone = [(watched[i].canary.name, [i], watched[i].sensitivity) for i in range(len(inner), len(watched))]
    for name, columns, sensitivity in [("inside", list(inner), _worst(watched[: len(inner)])), *alone]:
        # From the middle of its own two hypotheses: canaries of different strength would blur each other.
        middles = [watched[i].start + watched[i].shift / 2 for i in columns]
        without, with_ = (
            torch.stack([side[i] - middle for i, middle in zip(columns, middles, strict=True)], dim=1).flatten().numpy()
            for side in (absent, present)
        )
        tests.append((name, sensitivity, all(watched[i].noisy for i in columns), without, with_))
    return tests


def _worst(watched: Sequence[_Watched]) -> Sensitivity:
    """Of canaries that are alike."""
    found = [w.sensitivity for w in watched]
    return Sensitivity(max(s.largest for s in found), min(s.own for s in found), found[0].wanted)


def _release_many(rig: Rig, total: ClippedSum, trials: int, directions: Tensor) -> Tensor:
    """(trials, directions): what each release shows along each direction."""
    return torch.stack([rig.release(total) @ directions for _ in range(trials)])


def _background(seed: int) -> list[Record]:
    return [canaries.anywhere(10_000 + BACKGROUND * seed + i).record for i in range(BACKGROUND)]


def _calibrated(mechanism: Mechanism, epsilon: float, delta: float) -> float:
    return calibrate_noise(
        accountant="prv",
        target_epsilon=epsilon,
        target_delta=delta,
        sample_rate=mechanism.sample_rate,
        steps=mechanism.steps,
    )


def _noise_p_value(statistic: np.ndarray) -> float:
    """Of the sum of squares about the mean, which is chi-squared where the noise's standard deviation is 1."""
    return float(chi2.cdf(((statistic - statistic.mean()) ** 2).sum(), len(statistic) - 1))


def _log_likelihood_ratio(statistic: Tensor, shift: Tensor) -> Tensor:
    """Of "the canary is in the data and enters a step with probability q" against "it is not", for each step."""
    there = shift * statistic - shift**2 / 2
    return torch.logaddexp(torch.full_like(there, 1 - RUN_RATE).log(), torch.full_like(there, RUN_RATE).log() + there)


def _whole_gradient(rig: Rig, record: Record) -> Tensor:
    """The record's gradient of all parameters as it is without any projection."""
    parameters = list(rig.model.parameters())
    parts, at_x, at_g = [], 0, 0
    for parameter in parameters:
        if parameter.dim() == 2:
            outputs, inputs = parameter.shape
            x, g = record.x[at_x : at_x + inputs], record.g[at_g : at_g + outputs]
            at_x, at_g = at_x + inputs, at_g + outputs
            parts.append(torch.outer(g, x).flatten())
        else:
            parts.append(g)
    return torch.nn.functional.normalize(torch.cat(parts), dim=0)
