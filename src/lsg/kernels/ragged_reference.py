"""Norms and weighted sums of per-sample gradients in PyTorch's operations: what `ragged_kernel.py` replaces.

Shapes: B = samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE = 128  # numbers that are summed in float32: among more, large ones would swallow small ones
_LEAST, _MOST = 1e-8, 1e18  # norms between which no square that counts leaves the range of float32


@dataclass(frozen=True, eq=False)
class Matrix:
    """Explicit gradients, (B, entries)."""

    matrix: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    def row_norms(self) -> Tensor:
        return row_norms(self.matrix)

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        # What is left out may be infinite, and 0 times that is no number.
        return factors_B @ self.matrix.masked_fill((factors_B == 0).unsqueeze(1), 0.0)


def row_norms(values: Tensor) -> Tensor:
    """L2 norms over the last dimension, in double precision.

    On a CPU a float32 sum of a million squares is off by 1e-5: short pieces are summed in float32, and the pieces in
    double precision. A GPU sums in a tree, which is exact enough.
    """
    if values.device.type != "cpu":
        dtype = torch.promote_types(values.dtype, torch.float32)
        return torch.linalg.vector_norm(values, dim=-1, dtype=dtype).double()
    # Numbers that do not lie side by side are added one by one, which rounds more.
    if values.dtype != torch.float32 or values.shape[-1] <= _PIECE or values.stride(-1) != 1:
        return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    whole = values.shape[-1] // _PIECE * _PIECE
    pieces = torch.linalg.vector_norm(values[..., :whole].unflatten(-1, (-1, _PIECE)), dim=-1).double()
    rest = torch.linalg.vector_norm(values[..., whole:], dim=-1).double()
    norms = torch.hypot(torch.linalg.vector_norm(pieces, dim=-1), rest)
    inexact = ~((norms > _LEAST) & (norms < _MOST))
    norms[inexact] = torch.linalg.vector_norm(values[inexact], dim=-1, dtype=torch.float64)
    return norms
