"""One-step power method (paper, Alg. 2): weights in, orthonormal factors out, for a stack of same-shaped weights."""

from typing import Protocol

import torch
from torch import Tensor

_JITTER = 1e-6  # of a matrix's size: what a float32 product has lost to rounding anyway, far above float64's rounding


class Stack(Protocol):
    """(k, m, n) matrices that can be multiplied with (k, n, r): a tensor, or what reads like one."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def mT(self) -> "Stack": ...  # noqa: N802 -- a tensor's own word

    def __matmul__(self, right: Tensor, /) -> Tensor: ...


def gaussian(shape: tuple[int, ...], like: Stack, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of `like`'s dtype and device, drawn where the generator lives."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)


def decompose(weights: Stack, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """weights (k, m, n) -> L (k, m, r) with orthonormal columns and R (k, r, n) with orthonormal rows.

    The start is a fresh Gaussian each time.
    """
    stack, m, n = weights.shape
    rank = min(rank, m, n)
    start = gaussian((stack, n, rank), weights, generator)
    left = orthonormal(weights @ start, generator)
    right = orthonormal(weights.mT @ left, generator)
    return left, right.mT


def orthonormal(columns: Tensor, generator: torch.Generator) -> Tensor:
    """(k, m, r) -> orthonormal columns that span the same space, for rank-deficient ones (an all-zero weight) too."""
    if columns.device.type == "cpu":
        q, r = torch.linalg.qr(columns)
        # The library's signs follow from the first row alone: where it is nearly zero (a padding token's embedding),
        # rounding would decide. Along the given columns they are continuous, and the same as `cholesky_qr` gives.
        return q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype).unsqueeze(-2)
    return cholesky_qr(columns, generator)


def cholesky_qr(columns: Tensor, generator: torch.Generator) -> Tensor:
    """The same for accelerators, where QR runs matrix by matrix: CholeskyQR2 in double precision.

    A few batched products, and no waiting for the device as a checked factorisation would. A trace of noise makes
    rank-deficient columns independent, and a shift of the first Gram matrix above its rounding keeps that one positive
    (Fukaya et al. 2020, shifted CholeskyQR); the second pass then meets well-conditioned columns.
    """
    _, m, r = columns.shape
    y = columns.double()
    y = y / (torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True) + 1e-300)
    y = y + gaussian(tuple(y.shape), y, generator) * (_JITTER / (m * r) ** 0.5)
    for shift in (1e-15 * (m * r), 0.0):
        gram = y.mT @ y
        gram.diagonal(dim1=1, dim2=2).add_(shift)
        y = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(gram).L.mT, y, upper=True, left=False)
    return y.to(columns.dtype)
