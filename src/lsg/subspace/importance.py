"""Which units are worth training: weights in, indices of the kept rows and columns out."""

import torch
from torch import Tensor


def kept_count(size: int, sparsity: float) -> int:
    """How many of `size` units stay trained when the lowest `sparsity` of them are masked; at least one."""
    # The tiny slack keeps 0.29 * 100 = 28.999999999999996 from being read as 28.
    return max(1, size - int(sparsity * size + 1e-9))


def top_indices(scores: Tensor, sparsity: float) -> Tensor | None:
    """scores (..., units) -> ascending indices of the kept units, or None for all (Alg. 1 as in the errata)."""
    count = kept_count(scores.shape[-1], sparsity)
    if count == scores.shape[-1]:
        return None
    return scores.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values


def row_importance(matrix: Tensor) -> Tensor:
    """Sum of absolute weights of each row: matrix (..., rows, columns) -> (..., rows). Eqs. 2 and 3."""
    return matrix.abs().sum(-1)


def column_importance(matrix: Tensor, taps: int) -> Tensor:
    """The same for columns, where `taps` neighbouring columns (a channel's kernel, Eqs. 4 and 5) are one unit."""
    return matrix.abs().sum(-2).unflatten(-1, (-1, taps)).sum(-1)


def spread_taps(units: Tensor | None, taps: int) -> Tensor | None:
    """Indices of kept channels -> indices of the columns of their taps."""
    if units is None or taps == 1:
        return units
    return (units.unsqueeze(-1) * taps + torch.arange(taps, device=units.device)).flatten(-2)
