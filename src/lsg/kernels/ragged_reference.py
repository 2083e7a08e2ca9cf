"""Norms and weighted sums of per-sample gradients in PyTorch's operations: what `ragged_kernel.py` replaces.

Shapes: B = samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
        return factors_B @ self.matrix.masked_fill((factors_B == 0).unsqueeze(1), 0.0)


def row_norms(values: Tensor) -> Tensor:
    """L2 norms over the last dimension. On a CPU, where a float32 sum of a million squares is off by 1e-5, in double
    precision; a GPU sums in a tree, which is exact enough."""
    on_cpu = values.device.type == "cpu"
    dtype = torch.float64 if on_cpu else torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values, dim=-1, dtype=dtype).double()
