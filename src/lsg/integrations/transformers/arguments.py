"""`PrivacyArguments`: what a Trainer must know to train privately, checked when it is made."""

import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from lsg.accounting.budget import safe_delta
from lsg.errors import ConfigurationError
from lsg.methods import LSG, Method
from lsg.perf import PerfConfig
from lsg.step.clipping import Clipping


@dataclass(kw_only=True)
class PrivacyArguments:
    """The privacy of a run; batch size, steps and learning rate are TrainingArguments'.

    target_epsilon: noise is calibrated so that all steps of the run stay within it. Give it, or `noise_multiplier`.
    target_delta: a tenth of one over the number of units, rounded down to a power of ten, unless given.
    noise_multiplier: standard deviation of the noise over `max_grad_norm`; 0 is allowed, ε is then infinite.
    method: LSG(rank=8, sparsity=0.5) unless given.
    max_grad_norm: C, the threshold of the clip; TrainingArguments' `max_grad_norm` unless given.
    clipping: "flat", "per_layer" or "automatic".
    unit_of: whom a step protects: one id for each record, or the name of the data set's column that has them.
    max_records_per_unit: the most records of a unit in a step.
    views: rows that the model gets for each record, adjacent; the data collator makes them.
    accountant: "prv", "pld" or "rdp". secure_mode, ledger: as in PrivacyEngine. perf: settings for speed.
    noise_generator: makes a run repeatable. Whoever knows its seed can undo the noise.
    """

    target_epsilon: float | None = None
    target_delta: float | None = None
    noise_multiplier: float | None = None
    method: Method = field(default_factory=LSG)
    max_grad_norm: float | list[float] | None = None
    clipping: Clipping = "flat"
    unit_of: Any = None
    max_records_per_unit: int | None = None
    views: int = 1
    accountant: str = "prv"
    secure_mode: bool = False
    ledger: str | os.PathLike[str] | None = None
    perf: PerfConfig = field(default_factory=PerfConfig)
    noise_generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("target_epsilon", "noise_multiplier") if getattr(self, name) is not None]
        if len(given) != 1:
            both = "both are given" if given else "neither is given"
            raise ConfigurationError(f"PrivacyArguments needs target_epsilon or noise_multiplier: {both}")
        for name in ("target_epsilon", "target_delta", "noise_multiplier"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or value < 0 or (not value and name[0] == "t")):
                raise ConfigurationError(f"PrivacyArguments: {name}={value!r} must be a number above 0")
        if self.target_delta is not None and self.target_delta >= 1:
            raise ConfigurationError(f"PrivacyArguments: target_delta={self.target_delta!r} must be below 1")
        if not isinstance(self.method, Method):
            raise ConfigurationError(f"PrivacyArguments: method={self.method!r} must be LSG(...), DPSGD(), ...")
        if not isinstance(self.perf, PerfConfig):
            raise ConfigurationError(f"PrivacyArguments: perf={self.perf!r} must be a PerfConfig")
        if self.secure_mode and self.noise_generator is not None:
            raise ConfigurationError(
                "PrivacyArguments: noise_generator is given, but secure_mode=True draws noise that nobody repeats"
            )

    def delta_for(self, units: int) -> float:
        """The δ of a run on so many units. One of 1/N or more would allow publishing a record outright."""
        if self.target_delta is None:
            return safe_delta(units)
        noun = "record" if self.unit_of is None else "unit"
        if self.target_delta >= 1 / units:
            raise ConfigurationError(
                f"PrivacyArguments: target_delta={self.target_delta!r} must be below 1/N = {1 / units:.3g} "
                f"(N = {units:,} training {noun}s): a larger one allows publishing a {noun} outright. Left out, it is "
                "a tenth of 1/N"
            )
        return self.target_delta


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
