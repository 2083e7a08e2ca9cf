"""Sampling audit: which records entered which step, against what the accountant was told.

Under Poisson sampling every record enters every step by a coin of its own. The counts below are then binomial, exactly,
so that each test's false-alarm rate is at most what is asked for. A loader that shuffles uses each record once an epoch
and fills each batch to the same size, which the first two tests see at once.
"""

from dataclasses import dataclass

from scipy.stats import binom, binomtest

from lsg.audit.rig import Rig, blank
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
    """alpha: false-alarm rate of each single count. accounted_steps: what the accountant counted at `sample_rate`."""

    sample_rate: float
    steps: int
    accounted_steps: int
    counts: list[Count]
    alpha: float

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
        return found


def audit_batches(*, epochs: int, seed: int, alpha: float) -> Batches:
    """Epochs of the real loader and optimizer. Sampling is the same for every method. alpha: of all tests together."""
    rig = Rig(DPSGD(), "flat", [blank()] * RECORDS, noise_multiplier=1.0, seed=seed, sample_rate=BATCH / RECORDS)
    try:
        history = [[set(step.members) for step in rig.epoch()] for _ in range(epochs)]
        (phase,) = rig.engine.accountant.history
    finally:
        rig.close()
    steps = [members for epoch in history for members in epoch]
    rate = phase.sample_rate
    if rate == 1:  # unamplified: nothing is claimed about batches
        return Batches(rate, len(steps), phase.steps, [], alpha)
    each_epoch = len(history[0])
    halves = [(i, i + RECORDS // 2) for i in range(RECORDS // 2)]
    neighbours = [(i, i + 1) for i in range(0, RECORDS, 2)]
    successive = list(zip(steps[::2], steps[1::2], strict=False))
    counts = [
        Count("records in batches", sum(map(len, steps)), RECORDS * len(steps), rate),
        Count(
            "records used exactly once in an epoch",
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
            for kind, pairs in (("neighbouring records", neighbours), ("records half the data apart", halves))
        ),
        Count(
            "records in two steps in a row",
            sum(len(first & second) for first, second in successive),
            RECORDS * len(successive),
            rate**2,
        ),
    ]
    return Batches(rate, len(steps), phase.steps, counts, alpha / len(counts))
