"""How records enter steps: the one plan that sampler and accountant are made from, so that they cannot disagree."""

from dataclasses import dataclass

from lsg.errors import ConfigurationError


@dataclass(frozen=True)
class SamplingPlan:
    """How records enter steps. Where several records are one unit (`units.py`), read "unit" for "record" throughout:
    `records` is then the number of units, and `batch_size` is that of a step in units.

    poisson=True: each record enters each step independently with probability `sample_rate`; an epoch is the expected
        1 / sample_rate steps.
    poisson=False: each epoch cuts a random order of the records into batches, so that a record enters exactly one step
        of an epoch. That step is then accounted with rate 1 (see `accounted`): no amplification is claimed.
    """

    records: int
    batch_size: int
    poisson: bool = True

    def __post_init__(self) -> None:
        if self.records < 1:
            raise ConfigurationError("the data set is empty")
        if self.batch_size < 1:
            raise ConfigurationError(f"batch_size={self.batch_size} must be at least 1")

    @property
    def sample_rate(self) -> float:
        return min(1.0, self.batch_size / self.records)

    @property
    def expected_batch_size(self) -> int:
        return min(self.batch_size, self.records)

    def first_step(self, epoch: int) -> int:
        """Steps before this epoch. N / B need not be whole: epochs are rounded so that their sum stays right."""
        if self.poisson:
            return round(epoch / self.sample_rate)
        return epoch * -(-self.records // self.expected_batch_size)

    def steps(self, epochs: int) -> int:
        """Logical steps in that many epochs, at least one."""
        return max(1, self.first_step(epochs))

    def accounted(self, epochs: int) -> tuple[float, int]:
        """(sample rate, number of mechanisms) that the accountant is to compose for that many epochs."""
        return (self.sample_rate, self.steps(epochs)) if self.poisson else (1.0, epochs)
