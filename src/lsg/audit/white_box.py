"""White-box audit: canary records in one step (or many) of the real engine; what is released tells how private it was.

The adversary knows everything but the noise and whether the canary is there: weights, L, R, masks and the other
records. It looks at the gradients given to the optimizer, along the direction in which the canary would move them. That
is telling N(0, s²) from N(C, s²), the very thing that the accountant counts with, so the bound should come close to the
claim, and may not pass it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from lsg.accounting import calibrate_noise
from lsg.audit import canaries
from lsg.audit.bounds import Mechanism, lower_bounds
from lsg.audit.canaries import Canary
from lsg.audit.observations import Observed, Sensitivity, WhiteBox
from lsg.audit.rig import ONE_RECORD, Record, Rig, UnitShape, blank
from lsg.audit.watched_canary import Lift, WatchedCanary, worst_sensitivity
from lsg.methods import Clipping, Method
from lsg.step.clipping import ClippedSum

FEWER = 4  # the other canaries look for gross faults, not for a tight bound: trials are divided by this
BACKGROUND = 3  # other records in the batch
RUN_RECORDS, RUN_RATE = 8, 0.25  # of a run of many steps


def audit_step(
    method: Method,
    clipping: Clipping,
    *,
    epsilon: float,
    delta: float,
    trials: int,
    seed: int,
    alpha: float,
    unit: UnitShape = ONE_RECORD,
) -> WhiteBox:
    """One step at sample rate 1, released `trials` times with and without each canary, which is a whole unit.

    alpha: the rate of false alarms of all tests together.
    """
    mechanism = Mechanism()
    noise_multiplier = _calibrated(mechanism, epsilon, delta)
    background = _background(seed)
    rig = Rig(method, clipping, [*background, blank()], noise_multiplier=noise_multiplier, seed=seed, unit=unit)
    try:
        rig.epoch()  # one real step, for the accountant
        claimed = rig.engine.get_epsilon(delta)
        groups = _groups(rig, method, seed)
        lift = Lift(rig)
        watched = [WatchedCanary(canary, rig, lift, background) for group in groups for canary in group]
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
    unit: UnitShape = ONE_RECORD,
) -> WhiteBox:
    """Whole runs of `steps` steps on the private loader, with and without a canary in the data set.

    The adversary adds up log-likelihood ratios, which no other statistic beats.
    """
    per_epoch = round(1 / RUN_RATE)
    epochs = -(-steps // per_epoch)
    mechanism = Mechanism(RUN_RATE, epochs * per_epoch)
    noise_multiplier = _calibrated(mechanism, epsilon, delta)
    others = [blank()] * (RUN_RECORDS - canaries.TOGETHER)
    probe = Rig(method, clipping, others, noise_multiplier=noise_multiplier, seed=seed, unit=unit)
    chosen, lift = canaries.inside(probe), Lift(probe)
    watched = [WatchedCanary(canary, probe, lift, others) for canary in chosen]
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
            unit=unit,
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
    observed = Observed(f"inside, {mechanism.steps} steps", worst_sensitivity(watched), bounds, None, *statistics)
    return WhiteBox(claimed, noise_multiplier, mechanism, [observed], alpha)


def _groups(rig: Rig, method: Method, seed: int) -> list[list[Canary]]:
    hidden = canaries.outside(rig, method)
    groups = [canaries.inside(rig), [canaries.anywhere(seed)], canaries.in_one_layer(seed)]
    return groups if hidden is None else [*groups, [hidden]]


def _tests(
    watched: list[WatchedCanary], absent: Sequence[Tensor], present: Sequence[Tensor]
) -> list[tuple[str, Sensitivity, bool, np.ndarray, np.ndarray]]:
    """Canary, sensitivity, whether noise is expected, statistics without and with it.

    The ones inside are alike and make one test: in one release each of them is a trial of its own, as the noise along
    orthogonal directions is independent.
    """
    tests = []
    inner = range(canaries.TOGETHER)
    alone = [(watched[i].canary.name, [i], watched[i].sensitivity) for i in range(len(inner), len(watched))]
    for name, columns, sensitivity in [("inside", list(inner), worst_sensitivity(watched[: len(inner)])), *alone]:
        # From the middle of its own two hypotheses: canaries of different strength would blur each other.
        middles = [watched[i].start + watched[i].shift / 2 for i in columns]
        without, with_ = (
            torch.stack([side[i] - middle for i, middle in zip(columns, middles, strict=True)], dim=1).flatten().numpy()
            for side in (absent, present)
        )
        tests.append((name, sensitivity, all(watched[i].noisy for i in columns), without, with_))
    return tests


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
