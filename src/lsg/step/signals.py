"""What a step was made of: its clipped sum and its noisy sum in, the share that was clipped and three lengths out.

None of it is private but the length of the noise, which the plan tells, and that of the update, which is released with
the weights: look at these numbers, do not publish them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lsg.methods import Clipping
from lsg.step.clipping import ClippedSum
from lsg.step.noise import NoisySum


@dataclass(frozen=True)
class StepSignals:
    """One logical step in numbers. NOT private: `units`, `clipped` and `signal_norm` come from the data without noise.

    Tensors are single numbers on the model's device: reading one, by `float()` say, waits for it.
    Norms are L2 norms in the space that is trained (low-rank factors, masked rows left out), over the expected batch
    size where the update is.

    units: in the batch; None with automatic clipping, which scales every unit, so that no share means anything.
    clipped: how many of them were shortened; with per_layer clipping a unit counts by the share of its parameters.
    signal_norm: of the clipped mean before noise. noise_norm: what the noise on it is expected to have.
    update_norm: of what the optimizer gets, signal and noise together.
    """

    units: int | None
    clipped: Tensor | float
    signal_norm: Tensor
    noise_norm: float
    update_norm: Tensor

    @property
    def clip_share(self) -> Tensor | float | None:
        """Share of the units that were shortened; None of an empty draw, and with automatic clipping."""
        return self.clipped / self.units if self.units else None


def measure(clipped: ClippedSum, noisy: NoisySum, *, divisor: int, mode: Clipping) -> StepSignals:
    """divisor: what turns sums into the update. Nothing waits for the device."""
    return StepSignals(
        units=None if mode == "automatic" else clipped.units,
        clipped=clipped.shortened,
        signal_norm=torch.linalg.vector_norm(clipped.vector) / divisor,
        noise_norm=noisy.standard_deviation * math.sqrt(noisy.vector.numel()) / divisor,
        update_norm=torch.linalg.vector_norm(noisy.vector) / divisor,
    )
