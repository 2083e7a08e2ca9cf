"""The privacy loss of the Poisson-sampled Gaussian mechanism: its distribution function, a grid, ε of masses on it.

The same arithmetic as Opacus's `accountants.analysis.prv` (Gopi et al. 2021), to the bit, which a test compares: to
import that module loads all of Opacus and PyTorch, for which `lsg budget` would wait two seconds.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Domain:
    """`size` losses from t_min to t_max, evenly spaced; `shifts`: how far they were moved so far."""

    t_min: float
    t_max: float
    size: int
    shifts: float = 0.0

    def shift_right(self, distance: float) -> "Domain":
        return replace(self, t_min=self.t_min + distance, t_max=self.t_max + distance, shifts=self.shifts + distance)

    @property
    def ts(self) -> Array:
        return np.linspace(self.t_min, self.t_max, self.size)


def loss_distribution(losses: Array, rate: float, noise: float) -> Array:
    """The probability that a step's loss is at most so large (Gopi et al., proposition B.4)."""
    from scipy.special import erfc

    possible = losses > (np.log(1 - rate) if rate < 1 else -np.inf)
    z = np.log(np.where(possible, (np.exp(losses) + rate - 1) / rate, 1))
    width = 2 * np.sqrt(2) * noise
    with_record = rate * erfc((2 * z * noise**2 - 1) / width) / 2
    without = (1 - rate) * erfc((2 * z * noise**2 + 1) / width) / 2
    return np.where(possible, -with_record - without + 1.0, 0.0)


def upper_epsilon(masses: Array, domain: Domain, delta: float, delta_error: float, eps_error: float) -> float:
    """The ε at which the masses' hockey-stick divergence is δ - delta_error, plus eps_error."""
    if np.finfo(np.longdouble).eps * domain.size > delta - delta_error:
        raise ValueError(f"rounding errors on {domain.size} points are larger than delta={delta:g}")
    losses = domain.ts
    above = np.flip(np.flip(masses).cumsum())
    weighted = np.flip(np.flip(masses * np.exp(-losses)).cumsum())
    negative_delta = np.exp(losses) * weighted - above
    place = np.searchsorted(negative_delta, -(delta - delta_error), side="left")
    if place <= 0:
        raise RuntimeError("no loss on the grid is large enough for this delta")
    return float(np.log((above[place] - (delta - delta_error)) / weighted[place]) + eps_error)
