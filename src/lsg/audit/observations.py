"""What white-box attacks showed, and which of that contradicts the epsilon that the engine claims."""

from dataclasses import dataclass

import numpy as np

from lsg.audit.bounds import Bounds, Mechanism

TOLERANCE = 1e-6  # by which rounding may move a clipped sum beyond the bound, as a share of it


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
