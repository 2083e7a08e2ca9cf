"""Per-sample gradients in blocks that are clipped together: norms and weighted sums, from few kernels.

Shapes: B = samples of the micro-batch.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lsg.kernels import ragged_kernel, ragged_reference
from lsg.parameters.outer import OuterProducts

Part = Tensor | OuterProducts  # gradients of each sample in some entries: (B, entries), or what stands for it
_SMALL = 2**24  # numbers: a matrix below this is worth joining with others
_JOINED = 2**26  # numbers that are joined at most


class Block(Protocol):
    """Some parts as one."""

    @property
    def dtype(self) -> torch.dtype: ...

    def row_norms(self) -> Tensor:
        """(B), float64; not finite where a sample is broken."""

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """The sum of the rows, each times its factor. A row of factor 0 adds 0, whatever it holds."""


def make_block(parts: Sequence[Part]) -> Block:
    """Parts that are clipped together; a factored one is so by itself."""
    if len(parts) == 1 and isinstance(parts[0], OuterProducts):
        return parts[0]
    matrices = [part for part in parts if isinstance(part, Tensor)]
    assert len(matrices) == len(parts)
    if ragged_kernel.supports(matrices):
        return ragged_kernel.Matrices(matrices)
    return ragged_reference.Matrix(matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=1))


def by_slot(per_sample: Sequence[Sequence[Part]]) -> list[list[int]]:
    """The places of each slot's parts among all."""
    places = itertools.count()
    return [[next(places) for _ in parts] for parts in per_sample]


def few_groups(parts: Sequence[Part]) -> list[list[int]]:
    """Matrices together: all that kernels can take, else small ones, for they are copied. Factored ones and large ones
    by themselves: they need no help."""
    alone = [[i] for i, part in enumerate(parts) if isinstance(part, OuterProducts)]
    explicit = [(i, part) for i, part in enumerate(parts) if isinstance(part, Tensor)]
    if explicit and ragged_kernel.supports([part for _, part in explicit]):
        return [*alone, [i for i, _ in explicit]]
    together: list[list[int]] = []
    room = 0
    for i, part in explicit:
        if part.numel() > _SMALL:
            alone.append([i])
            continue
        if not together or part.numel() > room:
            together.append([])
            room = _JOINED
        together[-1].append(i)
        room -= part.numel()
    return alone + together
