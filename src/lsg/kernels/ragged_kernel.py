"""Triton kernels for many matrices of per-sample gradients at once; importable without Triton (AVAILABLE is False).

Clipping wants the norms of each sample's rows and then a weighted sum of them. Both read every matrix where it is: a
table of addresses takes the place of joining them. One number for each sample and matrix, or one for each column, is
all that is written. Squares are added up in float64: a float32 sum of millions comes out low, and would pass the bound.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lsg.kernels.optional_triton import AVAILABLE, tl, triton

if AVAILABLE:

    @triton.jit
    def _square_sums(addresses, strides, widths, out, PARTS, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        program = tl.program_id(0)
        sample, part = (program // PARTS).to(tl.int64), program % PARTS
        row = tl.load(addresses + part).to(tl.pointer_type(tl.float32)) + sample * tl.load(strides + part)
        width = tl.load(widths + part)
        squares = tl.zeros((BLOCK,), dtype=tl.float64)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(row + columns, mask=columns < width, other=0.0)
            squares += (values * values).to(tl.float64)
        tl.store(out + program, tl.sum(squares, axis=0))

    @triton.jit
    def _weighted_sums(  # type: ignore[no-untyped-def]
        addresses, strides, widths, offsets, tile_parts, tile_starts, factors, out, SAMPLES,
        ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        part = tl.load(tile_parts + tl.program_id(0))
        columns = tl.load(tile_starts + tl.program_id(0)) + tl.arange(0, BLOCK)
        inside = columns < tl.load(widths + part)
        matrix = tl.load(addresses + part).to(tl.pointer_type(tl.float32))
        stride = tl.load(strides + part)
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for first in range(0, SAMPLES, ROWS):
            samples = first + tl.arange(0, ROWS)
            factor = tl.load(factors + samples, mask=samples < SAMPLES, other=0.0)
            # A row of factor 0 is not even read: it may hold anything.
            wanted = (factor != 0.0)[:, None] & inside[None, :]
            places = matrix + samples.to(tl.int64)[:, None] * stride + columns[None, :]
            total += factor[:, None] * tl.load(places, mask=wanted, other=0.0)
        tl.store(out + tl.load(offsets + part) + columns, tl.sum(total, axis=0), mask=inside)


_BLOCK, _TILE, _ROWS = 1024, 256, 16


class _Table(NamedTuple):
    """Where matrices are, on the device; and a tile's matrix and first column, tile by tile."""

    addresses: Tensor
    strides: Tensor
    widths: Tensor
    offsets: Tensor
    tile_parts: Tensor
    tile_starts: Tensor


def supports(parts: Sequence[Tensor]) -> bool:
    """Whether the kernels can work on such matrices."""
    return AVAILABLE and all(part.is_cuda and part.dtype == torch.float32 and part.stride(1) == 1 for part in parts)


class Matrices:
    """Matrices (B, n_k) that the kernels take, as one of all their columns."""

    dtype = torch.float32

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts  # kept alive: the table has their addresses only
        self._device, self._samples = parts[0].device, parts[0].shape[0]
        places = tuple((part.data_ptr(), part.stride(0), part.shape[1]) for part in parts)
        self._table = _table(places, self._device)

    def row_norms(self) -> Tensor:
        """(B), float64."""
        return self.square_sums().sum(1).sqrt()

    def square_sums(self) -> Tensor:
        """(B, parts) in float64: the sums of squares of their rows."""
        out = torch.empty(self._samples, len(self._parts), dtype=torch.float64, device=self._device)
        table = self._table
        with torch.cuda.device(self._device):
            _square_sums[(out.numel(),)](
                table.addresses, table.strides, table.widths, out, len(self._parts), BLOCK=_BLOCK, num_warps=4
            )
        return out

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """The sum of the rows, each times its sample's factor. A row of factor 0 adds 0, whatever it holds."""
        columns = sum(part.shape[1] for part in self._parts)
        out = torch.empty(columns, dtype=torch.float32, device=self._device)
        with torch.cuda.device(self._device):
            _weighted_sums[(self._table.tile_parts.numel(),)](
                *self._table, factors_B.contiguous(), out, self._samples, ROWS=_ROWS, BLOCK=_TILE, num_warps=4
            )
        return out


@lru_cache(maxsize=64)  # recorded micro-batches have the same addresses each time
def _table(places: tuple[tuple[int, int, int], ...], device: torch.device) -> _Table:
    addresses, strides, widths = zip(*places, strict=True)
    tiles = [(part, start) for part, width in enumerate(widths) for start in range(0, width, _TILE)]
    offsets = [0, *accumulate(widths)][:-1]

    def moved(values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu").pin_memory().to(device, non_blocking=True)

    return _Table(
        moved(addresses, torch.int64),
        moved(strides, torch.int64),
        moved(widths, torch.int32),
        moved(offsets, torch.int64),
        moved([part for part, _ in tiles], torch.int32),
        moved([start for _, start in tiles], torch.int32),
    )
