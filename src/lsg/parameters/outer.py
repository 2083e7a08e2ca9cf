"""Per-sample gradients of a dense weight matrix in factored form: kept as two factors, never multiplied out.

A sample's gradient of a linear layer's weight is g^T x, with x (T, in) coming in and g (T, out) coming back. Norms and
the clipped sum are all that is wanted of it. The norms are those of the products themselves, formed on chip, or a few
at a time; for several tokens the shortcut by way of x x^T and g g^T cancels, and an underestimated norm would pass the
bound. The sum is one product over the tokens of all samples.

Both round, each in its own way, relative to S = sum_t |x_t| |g_t|, what a sample's tokens would come to if none
cancelled. So a sample whose tokens cancel to less than 2^-6 S is taken for one of that norm: whatever comes in, what
rounding leaves of a clipped sample in the sum is a small part of the bound. (2^-18 of it where sums round to nearest;
tensor cores may truncate, and split a sample between two sums: 2^-9 in a model of that.)

Shapes: B = samples, T = tokens; M, N = rows and columns of the weight as it is stored.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lsg.kernels import exact, outer_kernel
from lsg.kernels.optional_triton import usable
from lsg.kernels.ragged_reference import row_norms

_CANCELLED = 2.0**-6
_CHUNK = 2**20  # numbers of explicit products at a time: what stays in a processor's cache
_SMALL = 2**14  # entries of a weight: below this products cost less, as they are clipped together with others


@dataclass(frozen=True, eq=False)
class OuterProducts:
    """rows_b^T columns_b of each sample b, of which the `kept` entries count, times `scale`.

    kept: indices into the flattened M x N, None for all.
    """

    rows: Tensor  # (B, T, M)
    columns: Tensor  # (B, T, N)
    kept: Tensor | None = None
    scale: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.rows.dtype, torch.float32)

    @property
    def shape(self) -> tuple[int, int]:
        """That of the matrix that this stands for: samples, entries."""
        entries = self.rows.shape[2] * self.columns.shape[2] if self.kept is None else self.kept.numel()
        return self.rows.shape[0], entries

    def __getitem__(self, samples: slice) -> "OuterProducts":
        return replace(self, rows=self.rows[samples], columns=self.columns[samples])

    def take(self, samples: Tensor) -> "OuterProducts":
        """The samples with these numbers, in this order."""
        return replace(self, rows=self.rows.index_select(0, samples), columns=self.columns.index_select(0, samples))

    def average_adjacent(self, size: int) -> "OuterProducts":
        """Each `size` neighbouring samples as one, their mean: a sum of products is the product of all their tokens."""
        rows, columns = (t.unflatten(0, (-1, size)).flatten(1, 2) for t in (self.rows, self.columns))
        return replace(self, rows=rows, columns=columns, scale=self.scale / size)

    def explicit(self) -> Tensor:
        """(B, entries): the matrix that this stands for."""
        flat = self.materialize().flatten(1)
        return (flat if self.kept is None else flat.index_select(1, self.kept)) * self.scale

    def row_norms(self) -> Tensor:
        """(B), float64, at least `_CANCELLED` times the sum of the tokens' norms. Not finite for a broken sample."""
        if self.rows.shape[1] == 1 and self.kept is None:  # the norm of one product is the product of the norms
            norms = self._without_cancelling()
        elif usable(self.rows):
            norms = outer_kernel.square_sums(self.rows, self.columns, self._mask()).sum(1, dtype=torch.float64).sqrt()
        else:
            size = max(1, _CHUNK // (self.rows.shape[2] * self.columns.shape[2]))
            chunks = zip(self.rows.split(size), self.columns.split(size), strict=True)
            norms = torch.cat([self._norms_of_explicit(*chunk) for chunk in chunks])
        norms = torch.maximum(norms, self._without_cancelling() * _CANCELLED)
        return norms if self.scale == 1.0 else norms * self.scale

    def _norms_of_explicit(self, rows: Tensor, columns: Tensor) -> Tensor:
        flat = exact.products(rows, columns).flatten(1)
        return row_norms(flat if self.kept is None else flat.index_select(1, self.kept))

    def _without_cancelling(self) -> Tensor:
        """(B), float64: what the norms would be if the tokens' products all pointed the same way."""
        rows_BT, columns_BT = (row_norms(t) for t in (self.rows, self.columns))
        return (rows_BT * columns_BT).sum(1)

    def _mask(self) -> Tensor | None:
        if self.kept is None:
            return None
        m, n = self.rows.shape[2], self.columns.shape[2]
        return torch.zeros(m * n, dtype=torch.bool, device=self.kept.device).index_fill(0, self.kept, True).view(m, n)

    def weighted_sum(self, factors_B: Tensor) -> Tensor:
        """The kept entries of the samples' sum, each times its factor. One of factor 0 adds 0, whatever it holds."""
        weights_B = factors_B
        if self.scale != 1.0:
            weights_B = F.threshold(factors_B * self.scale, torch.finfo(factors_B.dtype).tiny, 0.0)
        total = exact.weighted_sum(self.rows, self.columns, weights_B).flatten()
        return total if self.kept is None else total.index_select(0, self.kept)

    def materialize(self) -> Tensor:
        """(B, M, N), all entries, not scaled."""
        return exact.products(self.rows, self.columns)


def is_faster(x: Tensor, outputs: int) -> bool:
    """Whether to keep input and output gradient of x (B, ..., in) -> (B, ..., outputs): where the two are smaller than
    their product. Memory traffic is what per-sample gradients cost."""
    tokens, inputs = x.shape[1:-1].numel(), x.shape[-1]
    size = inputs * outputs
    return size >= _SMALL and tokens * (inputs + outputs) <= size
