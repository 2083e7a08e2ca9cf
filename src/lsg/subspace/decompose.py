"""One-step power method (paper, Alg. 2): weights in, orthonormal factors out, for a stack of same-shaped weights."""

import torch
from torch import Tensor


def gaussian(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of `like`'s dtype and device, drawn where the generator lives."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)


def decompose(weights: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """weights (k, m, n) -> L (k, m, r) with orthonormal columns and R (k, r, n) with orthonormal rows.

    The start is a fresh Gaussian each time. QR gives orthonormal columns for rank-deficient weights (all zero) too.
    """
    stack, m, n = weights.shape
    rank = min(rank, m, n)
    start = gaussian((stack, n, rank), weights, generator)
    left = torch.linalg.qr(weights @ start).Q
    right = torch.linalg.qr(weights.mT @ left).Q.mT
    return left, right
