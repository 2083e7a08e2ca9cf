"""Which units are worth training: weights in, indices of the kept rows and columns out."""

import torch
from torch import Tensor

_ROW = 8


def kept_count(size: int, sparsity: float) -> int:
    """How many of `size` units stay trained when the lowest `sparsity` of them are masked; at least one."""
    # The tiny slack keeps 0.29 * 100 = 28.999999999999996 from being read as 28.
    return max(1, size - int(sparsity * size + 1e-9))


def top_units(scores: Tensor, sparsity: float) -> tuple[Tensor, Tensor] | None:
    """scores (..., units) -> ascending indices of the kept units and each unit's place among them, -1 where masked.

    None where all are kept. The lowest are masked (Alg. 1 as in the errata).
    """
    count = kept_count(scores.shape[-1], sparsity)
    if count == scores.shape[-1]:
        return None
    top = scores.topk(count, dim=-1, sorted=False).indices
    # Ascending order by counting instead of sorting: the place of a kept unit is how many kept ones come before it.
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top, True)
    before = kept.cumsum(-1) - 1
    units = torch.arange(scores.shape[-1], device=scores.device).expand_as(before)
    room = -(-(count + 1) // _ROW) * _ROW  # so that each row of a stack starts where fast loads can
    indices = units.new_empty(*scores.shape[:-1], room).scatter(-1, before.where(kept, count), units)
    return indices[..., :count], before.where(kept, -1)


def top_indices(scores: Tensor, sparsity: float) -> Tensor | None:
    """The indices alone."""
    top = top_units(scores, sparsity)
    return None if top is None else top[0]


def row_importance(matrix: Tensor) -> Tensor:
    """Sum of absolute weights of each row: matrix (..., rows, columns) -> (..., rows). Eqs. 2 and 3."""
    return _absolute_sum(matrix, -1)


def column_importance(matrix: Tensor, taps: int) -> Tensor:
    """The same for columns, where `taps` neighbouring columns (a channel's kernel, Eqs. 4 and 5) are one unit."""
    return _absolute_sum(matrix, -2).unflatten(-1, (-1, taps)).sum(-1)


def _absolute_sum(matrix: Tensor, dim: int) -> Tensor:
    """Along `dim`. On a CPU PyTorch's norm takes two to ten times as long as a sum; on a GPU it saves a copy."""
    return matrix.abs().sum(dim) if matrix.device.type == "cpu" else torch.linalg.vector_norm(matrix, ord=1, dim=dim)


def spread_taps(units: tuple[Tensor, Tensor] | None, taps: int) -> tuple[Tensor, Tensor] | None:
    """Kept channels (indices and places) -> the same of their columns, `taps` for each channel."""
    if units is None or taps == 1:
        return units
    indices, place = units
    tap = torch.arange(taps, device=indices.device)
    columns = (indices.unsqueeze(-1) * taps + tap).flatten(-2)
    places = torch.where(place.unsqueeze(-1) >= 0, place.unsqueeze(-1) * taps + tap, -1).flatten(-2)
    return columns, places
