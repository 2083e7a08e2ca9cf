"""What to audit, and how surely: options of `lsg audit`, checked."""

from dataclasses import dataclass
from typing import get_args

from lsg.errors import ConfigurationError
from lsg.methods import PRIVATE_METHODS, Clipping

MODES = ("white-box", "one-run", "all")
CLIPPINGS: tuple[Clipping, ...] = get_args(Clipping)
RANK, SPARSITY = 3, 0.5  # the rank is that of the audited model's weights
SAMPLED_EPOCHS = 20
# The least and the most of each: more is a slip of the finger, and would take years or all memory.
COUNTS = {
    "trials": (100, 10_000_000),
    "steps": (1, 100_000),
    "canaries": (20, 1_000_000),
    "epochs": (1, 1_000_000),
    "seeds": (1, 100_000),
    "records_per_unit": (1, 1000),
    "views": (1, 1000),
}


@dataclass(frozen=True)
class AuditSettings:
    """What to audit, and how surely.

    trials: releases of a step with, and as many without, a canary. steps: of whole runs; 1: one step only.
    confidence: an intact engine is called consistent with at least this probability, all tests of all seeds together.
    records_per_unit, views: units of several records of one id, and of several views of each record, are added and
        removed; with 1 and 1, single records.
    """

    mode: str = "all"
    method: str = "lsg"
    clipping: Clipping = "flat"
    epsilon: float = 3.0
    delta: float = 1e-5
    trials: int = 2000
    steps: int = 8
    canaries: int = 200
    epochs: int = 30
    seeds: int = 1
    confidence: float = 0.999
    records_per_unit: int = 1
    views: int = 1

    def __post_init__(self) -> None:
        for option, choices in (("mode", MODES), ("method", PRIVATE_METHODS), ("clipping", CLIPPINGS)):
            if getattr(self, option) not in choices:
                raise ConfigurationError(f"{option}={getattr(self, option)!r} must be one of {', '.join(choices)}")
        if not 0 < self.epsilon < 100:
            raise ConfigurationError(f"epsilon={self.epsilon:g} must be above 0 and below 100")
        if not 0 < self.delta < 1e-3:
            raise ConfigurationError(f"delta={self.delta:g} must be above 0 and below 0.001")
        if not 0.5 <= self.confidence < 1:
            raise ConfigurationError(f"confidence={self.confidence:g} must be at least 0.5 and below 1")
        for option, (least, most) in COUNTS.items():
            value = getattr(self, option)
            if not least <= value <= most:
                side = f"at least {least}" if value < least else f"at most {most:,}"
                raise ConfigurationError(f"{option}={value} must be {side}")
