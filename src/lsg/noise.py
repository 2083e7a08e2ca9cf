"""The only place where noise is drawn: a clipped sum in, a noisy sum out."""

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from lsg.clipping import ClippedSum


@dataclass(frozen=True)
class NoisySum:
    """What may leave the private step: a clipped sum plus Gaussian noise of `standard_deviation` on every entry."""

    vector: Tensor
    standard_deviation: float


def add_noise(clipped: ClippedSum, noise_multiplier: float, generator: torch.Generator) -> NoisySum:
    """The Gaussian mechanism: N(0, (noise_multiplier * bound)^2) on each entry, in float32 or better.

    Masked entries are not part of a clipped sum, so they get none.
    """
    vector = clipped.vector.to(torch.promote_types(clipped.vector.dtype, torch.float32))
    deviation = noise_multiplier * clipped.bound
    if deviation == 0:
        return NoisySum(vector, 0.0)
    noise = torch.randn(vector.shape, generator=generator, device=generator.device, dtype=vector.dtype)
    return NoisySum(vector + deviation * noise.to(vector.device), deviation)


def fresh_generator(device: torch.device, seed: int | None = None) -> torch.Generator:
    """A stream of its own on a device, seeded by the operating system unless a seed is given."""
    return torch.Generator(device).manual_seed(secrets.randbits(63) if seed is None else seed)
