"""The only place where noise is drawn: a clipped sum in, a noisy sum out.

The noise is made on a grid, so that no attack on floating-point noise applies (Mironov 2012; Jin et al. 2022,
arXiv:2112.05307; Haney et al. 2022, arXiv:2207.13793). Those attacks tell neighbouring sums apart by outputs that
floating-point noise can reach from one sum and not from the other. Here the sum and the noise are rounded to multiples
of one power of two g, as in Google's "Secure Noise Generation" (2020), and added as whole numbers, without rounding:

- The output is what rounding *exact* Gaussian noise on the *rounded sum* to the grid gives, as adding a multiple of g
  and rounding to one commute: post-processing of the Gaussian mechanism on the rounded sum.
- The rounded sums of neighbours differ by at most bound + g * sqrt(numbers) in L2 norm: each rounding moves an entry
  by at most g/2. The noise is scaled by that sensitivity, so epsilon needs no correction. It costs
  noise_multiplier * sqrt(numbers) * 2^-22 more noise: 0.02 % for 0.77 million numbers at a noise multiplier of 1.
- Noise is not exact before it is rounded. With `SecureNoise` it is off by about radius * 2^-50 standard deviations,
  and g is at least 2^-23 of one: a grid point's probability is off by a factor of at most about 1 ± radius * 2^-26. By
  advanced composition, 1,000 steps of 0.77 million numbers add less than 0.01 to epsilon and 1e-8 to delta.
  `TorchNoise` in float32 has fewer, coarser values than that needs: with it, nothing of the kind is claimed.

Not covered: the clipped sum itself is computed in floating point, so that a record may move it by slightly more than
the bound (Casacuberta et al., CCS 2022). docs/privacy.md says what else is not.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lsg.sampling.random_sources import NoiseSource
from lsg.step.clipping import ClippedSum

_GRID_BITS = 22  # finer costs exactness of the noise's probabilities, coarser costs more noise


@dataclass(frozen=True)
class NoisySum:
    """What may leave the private step: a clipped sum plus Gaussian noise of `standard_deviation` on every entry."""

    vector: Tensor
    standard_deviation: float


def add_noise(clipped: ClippedSum, noise_multiplier: float, source: NoiseSource) -> NoisySum:
    """The Gaussian mechanism: N(0, (noise_multiplier * bound)^2) on each entry, on a grid, in float32 or better.

    Masked entries are not part of a clipped sum, so they get none.
    """
    vector = clipped.vector.to(torch.promote_types(clipped.vector.dtype, torch.float32))
    if noise_multiplier * clipped.bound == 0:
        return NoisySum(vector, 0.0)
    grid = grid_of(noise_multiplier * clipped.bound)
    deviation = noise_multiplier * (clipped.bound + grid * math.sqrt(vector.numel()))
    normal = source.normal(vector.numel(), vector.device, vector.dtype)
    noise = (normal.double() * (deviation / grid)).round_()
    total = (vector.double() / grid).round_().add_(noise)  # whole numbers below 2^53: exact
    return NoisySum(total.mul_(grid).to(vector.dtype), deviation)


def grid_of(deviation: float) -> float:
    """The grid for noise of about this standard deviation: a power of two, known to everyone who knows the plan."""
    return math.ldexp(1.0, math.frexp(deviation)[1] - 1 - _GRID_BITS)
