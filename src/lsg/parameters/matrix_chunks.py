"""Same-shaped weights in, one stack of matrices out that reads like a tensor and exists a chunk at a time.

In a model of 8 billion bfloat16 numbers (16 GB) the weights of one shape alone take 15 GB in float32. The power method
and the scores of units read each weight only a few times: a chunk is copied, read, and overwritten by the next one.
The size of chunks does not change which random numbers meet which weights.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lsg.subspace.importance import column_importance, row_importance

CHUNK_BYTES = 256 * 2**20  # size of a chunk of weights or lifted gradients in float32; one matrix at least


def per_chunk(shape: Sequence[int], dtype: torch.dtype) -> int:
    """How many matrices of this shape make a chunk."""
    return max(1, CHUNK_BYTES // (torch.Size(shape).numel() * dtype.itemsize))


class Matrices:
    """k matrices of one shape, read as (k, rows, columns) in `dtype`. If one chunk holds all, they are copied once."""

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype, device: torch.device | None = None) -> None:
        """device: where they are read, if that is not where the weights are."""
        self.dtype, self.device = dtype, device or weights[0].device
        self.shape = torch.Size((len(weights), *weights[0].shape))
        self._size = per_chunk(weights[0].shape, dtype)
        self._weights = weights
        self._whole = self._copy(weights, self._memory()) if len(weights) <= self._size else None

    def each(self, compute: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Calls compute(chunk (c, rows, columns), its place among the k) -> (c, ...) chunk by chunk; gives (k, ...)."""
        parts = [compute(chunk, part) for chunk, part in self._chunks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def importance(self, taps: int) -> tuple[Tensor, Tensor]:
        """Of rows (k, rows) and of columns, `taps` neighbouring ones together: both in one pass over the weights."""
        scores = self.each(lambda chunk, _: torch.cat([row_importance(chunk), column_importance(chunk, taps)], dim=-1))
        rows, columns = scores.tensor_split([self.shape[1]], dim=-1)
        return rows, columns

    def __matmul__(self, right: Tensor) -> Tensor:
        """right: (k, columns, r)."""
        return self.each(lambda chunk, part: chunk @ right[part])

    @property
    def mT(self) -> "_Transposed":  # noqa: N802 -- a tensor's own word
        return _Transposed(self)

    def _chunks(self) -> Iterator[tuple[Tensor, slice]]:
        if self._whole is not None:
            yield self._whole, slice(None)
            return
        memory = self._memory()
        for start in range(0, len(self._weights), self._size):
            part = slice(start, start + self._size)
            yield self._copy(self._weights[part], memory), part

    def _memory(self) -> Tensor:
        return torch.empty(min(self._size, self.shape[0]), *self.shape[1:], dtype=self.dtype, device=self.device)

    @staticmethod
    def _copy(weights: Sequence[Tensor], memory: Tensor) -> Tensor:
        torch._foreach_copy_(memory[: len(weights)].unbind(), list(weights))
        return memory[: len(weights)]


class _Transposed:
    """The same matrices, each transposed."""

    def __init__(self, matrices: Matrices) -> None:
        self.mT = matrices
        self.dtype, self.device = matrices.dtype, matrices.device
        stack, rows, columns = matrices.shape
        self.shape = torch.Size((stack, columns, rows))

    def __matmul__(self, right: Tensor) -> Tensor:
        return self.mT.each(lambda chunk, part: chunk.mT @ right[part])
