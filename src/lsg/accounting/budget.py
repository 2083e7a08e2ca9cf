"""Plans a privacy budget: any three of ε, noise multiplier, epochs and batch size in, the fourth out.

Batches are Poisson samples and steps are counted as in training: both come from `SamplingPlan`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lsg.accounting.calibration import calibrate_noise
from lsg.accounting.epsilon import epsilon_of
from lsg.errors import ConfigurationError
from lsg.files.foreign_text import visible
from lsg.sampling.plan import SamplingPlan

MOST = 10**12  # records
SIZES = (1e-6, 1e9)  # of ε and of the noise multiplier: no accountant can tell more from one another
UNKNOWNS = ("epsilon", "noise_multiplier", "epochs", "batch_size")
_MOST_EPOCHS = 100_000


@dataclass(frozen=True)
class Budget:
    """A complete plan. `epsilon` is what all epochs spend by `accountant`: the target at most, where one was given."""

    records: int
    delta: float
    accountant: str
    noise_multiplier: float
    epochs: int
    batch_size: int
    epsilon: float

    @property
    def sampling(self) -> SamplingPlan:
        return SamplingPlan(self.records, self.batch_size)

    @property
    def steps(self) -> int:
        return self.sampling.steps(self.epochs)

    def epsilon_by(self, accountant: str) -> float:
        """The same plan's ε by another accountant."""
        return _spent(accountant, self.noise_multiplier, self.sampling.sample_rate, self.steps, self.delta)

    def over_training(self, points: int) -> list[tuple[int, float]]:
        """(steps, ε spent by then) at up to that many evenly spread points, the last one at the end."""
        counts = sorted({max(1, round(self.steps * i / points)) for i in range(1, points + 1)})
        rate = self.sampling.sample_rate
        return [(n, _spent(self.accountant, self.noise_multiplier, rate, n, self.delta)) for n in counts]

    def with_batch(self, batch_size: int) -> "Budget":
        """The plan of that batch size that spends as much in as many epochs, by another noise multiplier."""
        return plan_budget(
            records=self.records,
            delta=self.delta,
            accountant=self.accountant,
            epsilon=self.epsilon,
            epochs=self.epochs,
            batch_size=batch_size,
        )


def safe_delta(records: int) -> float:
    """A tenth of 1/N, rounded down to a power of ten."""
    return 10.0 ** -math.ceil(math.log10(10 * records))


def plan_budget(
    *,
    records: int,
    delta: float,
    accountant: str = "prv",
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
) -> Budget:
    """Find the one of the last four that is None. Epochs and batch size are the largest that stay within ε."""
    given: dict[str, Any] = dict(zip(UNKNOWNS, (epsilon, noise_multiplier, epochs, batch_size), strict=True))
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        names = ", ".join(map(_option, UNKNOWNS))
        which = ", ".join(_option(name) for name in UNKNOWNS if name not in missing) or "none"
        raise ConfigurationError(f"give three of {names} and leave out the one to compute; given: {which}")
    _check(records, delta, given)
    unknown = missing[0]

    def spent(by: str, value: float | None) -> float:
        """ε with this value for the unknown."""
        plan = {**given, unknown: value}
        rate, steps = SamplingPlan(records, plan["batch_size"]).accounted(plan["epochs"])
        return _spent(by, plan["noise_multiplier"], rate, steps, delta)

    found: float | None = None
    if unknown == "noise_multiplier":
        rate, steps = SamplingPlan(records, given["batch_size"]).accounted(given["epochs"])
        found = calibrate_noise(
            accountant=accountant, target_epsilon=given["epsilon"], target_delta=delta, sample_rate=rate, steps=steps
        )
    elif unknown != "epsilon":
        most = _MOST_EPOCHS if unknown == "epochs" else records
        found = _largest(lambda by, n: spent(by, n) <= given["epsilon"], accountant, most)
        if found == 0:
            least = "one epoch spends" if unknown == "epochs" else "even batches of one record spend"
            raise ConfigurationError(
                f"--epsilon {epsilon:g} cannot be kept: {least} {spent(accountant, 1):.3g}; "
                "raise --epsilon or --noise-multiplier"
            )
        if unknown == "epochs" and found == most:
            raise ConfigurationError(
                f"--epsilon {epsilon:g} is not used up by {most:,} epochs: lower it or --noise-multiplier"
            )
    return Budget(records, delta, accountant, **{**given, unknown: found, "epsilon": spent(accountant, found)})


def _spent(accountant: str, noise: float, rate: float, steps: int, delta: float) -> float:
    return epsilon_of(accountant=accountant, noise_multiplier=noise, sample_rate=rate, steps=steps, delta=delta)


def _largest(within: Callable[[str, int], bool], accountant: str, most: int) -> int:
    """The largest n up to `most` that is within the budget, 0 for none; spending grows with n.

    RDP is a looser bound and costs next to nothing, so it brings the search close before the accountant is asked.
    """
    near = _last_within(lambda n: within("rdp", n), 1, most)
    return near if accountant == "rdp" else _last_within(lambda n: within(accountant, n), max(near, 1), most)


def _last_within(within: Callable[[int], bool], start: int, most: int) -> int:
    """By doubling or halving from `start` until both sides are known, then by bisection."""
    low, high, probe = 0, most + 1, start
    while high - low > 1:
        if within(probe):
            low = probe
            probe = min(2 * probe, most) if high > most else (low + high) // 2
        else:
            high = probe
            probe = probe // 2 if low == 0 else (low + high) // 2
    return low


def _check(records: int, delta: float, given: dict[str, Any]) -> None:
    if not 1 <= records <= MOST:
        raise ConfigurationError(f"--records {visible(records, 40)} must be between 1 and {MOST:,}")
    if not 0 < delta < 1 / records:
        raise ConfigurationError(
            f"--delta {delta:g} must lie above 0 and below 1/N = {1 / records:.3g}: "
            "a larger one would allow publishing a record outright"
        )
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigurationError(f"{_option(name)} {visible(value, 40)} must be above 0 and finite")
        most = {"epochs": _MOST_EPOCHS, "batch_size": MOST}.get(name, SIZES[1])
        if value is not None and (value > most or (isinstance(value, float) and value < SIZES[0])):
            raise ConfigurationError(f"{_option(name)} {value:g} must be between {SIZES[0]:g} and {most:g}")
    batch_size = given["batch_size"]
    if batch_size is not None and batch_size > records:
        raise ConfigurationError(f"--batch-size {batch_size} is larger than --records {records}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
