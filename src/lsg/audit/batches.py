"""Sampling audit: which records entered which step, against what the accountant was told.

Under Poisson sampling every record enters every step by a coin of its own. The counts below are then binomial, exactly,
so that each test's false-alarm rate is at most what is asked for. A loader that shuffles uses each record once an epoch
and fills each batch to the same size, which the first two tests see at once. Where units of several records are
audited, it is units that are drawn and counted.
"""

from dataclasses import dataclass

from scipy.stats import binom, binomtest

from lsg.audit.rig import ONE_RECORD, Rig, UnitShape, blank
from lsg.methods import DPSGD

RECORDS, BATCH = 64, 8


@dataclass(frozen=True)
class Count:
    """How often something happened out of so many chances, and how often it should have by the accountant's rate."""

    what: str
    happened: int
    chances: int
    expected_rate: float

    @property
    def p_value(self) -> float:
        return float(binomtest(self.happened, self.chances, self.expected_rate).pvalue)


@dataclass(frozen=True)
class Batches:
    """alpha: false-alarm rate of each single count. accounted_steps: what the accountant counted at `sample_rate`.

    torn: how often a unit was drawn, but not with all records that it is to enter a step with.
    """

    sample_rate: float
    steps: int
    accounted_steps: int
    counts: list[Count]
    alpha: float
    torn: int = 0

    @property
    def violations(self) -> list[str]:
        found = [
            f"{c.what}: {c.happened} of {c.chances}, but sampling as accounted gives {c.expected_rate * c.chances:.0f} "
            f"(p = {c.p_value:.1e})"
            for c in self.counts
            if c.p_value < self.alpha
        ]
        if self.steps != self.accounted_steps:
            found.append(f"{self.steps} steps were taken, but {self.accounted_steps} accounted for")
        if self.torn:
            found.append(f"{self.torn} times a unit entered a step without all of its records")
        return found


def audit_batches(*, epochs: int, seed: int, alpha: float, unit: UnitShape = ONE_RECORD) -> Batches:
    """Epochs of the real loader and optimizer. Sampling is the same for every method. alpha: of all tests together."""
    records, rate = [blank()] * RECORDS, BATCH / RECORDS
    rig = Rig(DPSGD(), "flat", records, noise_multiplier=1.0, seed=seed, sample_rate=rate, unit=unit)
    try:
        taken = [rig.epoch() for _ in range(epochs)]
        (phase,) = rig.engine.accountant.history
    finally:
        rig.close()
    history = [[set(step.members) for step in epoch] for epoch in taken]
    steps = [members for epoch in history for members in epoch]
    torn = sum(len(step.torn) for epoch in taken for step in epoch)
    rate = phase.sample_rate
    if rate == 1:  # unamplified: nothing is claimed about batches
        return Batches(rate, len(steps), phase.steps, [], alpha, torn)
    each_epoch = len(history[0])
    halves = [(i, i + RECORDS // 2) for i in range(RECORDS // 2)]
    neighbours = [(i, i + 1) for i in range(0, RECORDS, 2)]
    successive = list(zip(steps[::2], steps[1::2], strict=False))
    what = "units" if unit.named else "records"
    counts = [
        Count(f"{what} in batches", sum(map(len, steps)), RECORDS * len(steps), rate),
        Count(
            f"{what} used exactly once in an epoch",
            sum(sum(i in members for members in epoch) == 1 for epoch in history for i in range(RECORDS)),
            RECORDS * epochs,
            float(binom.pmf(1, each_epoch, rate)),
        ),
        Count(
            "batches of exactly the expected size",
            sum(len(members) == BATCH for members in steps),
            len(steps),
            float(binom.pmf(BATCH, RECORDS, rate)),
        ),
        *(
            Count(
                f"{kind} in one batch",
                sum(i in members and j in members for members in steps for i, j in pairs),
                len(steps) * len(pairs),
                rate**2,
            )
            for kind, pairs in ((f"neighbouring {what}", neighbours), (f"{what} half the data apart", halves))
        ),
        Count(
            f"{what} in two steps in a row",
            sum(len(first & second) for first, second in successive),
            RECORDS * len(successive),
            rate**2,
        ),
    ]
    return Batches(rate, len(steps), phase.steps, counts, alpha / len(counts), torn)
