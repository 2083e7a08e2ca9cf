"""The record of one projected weight's subspace, and the lift from it back to the weight (Eq. 1).

A parameter is seen as a matrix M = parameter.flatten(1), rows x columns. The paper's W has its inputs first, so for a
layer that stores outputs first (`nn.Linear`) W is the transpose of M; `transposed` says so. L, R and the lift are in
the paper's orientation; layers, which only ever meet M, ask for `row_factor` and `column_factor`.

Shapes: m, n = W's rows and columns; r = rank. The functions below also take stacks of matrices (k, ...).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """Which entries of a factor are trained: `indices`, ascending, and each entry's `place` among them (-1: masked)."""

    indices: Tensor
    place: Tensor


@dataclass(frozen=True)
class Subspace:
    """L (m x r, orthonormal columns), R (r x n, orthonormal rows) and what of them is trained (None = all)."""

    left: Tensor
    right: Tensor
    left_kept: Kept | None
    right_kept: Kept | None
    transposed: bool

    @property
    def left_mask(self) -> Tensor:
        """m booleans, True where a row of the gradient of L is trained."""
        return _mask(self.left_kept, self.left.shape[0], self.left.device)

    @property
    def right_mask(self) -> Tensor:
        """n booleans, True where a column of the gradient of R is trained."""
        return _mask(self.right_kept, self.right.shape[1], self.right.device)

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @property
    def row_factor(self) -> Tensor:
        """The factor on M's rows, rows x r."""
        return self.right.T if self.transposed else self.left

    @property
    def column_factor(self) -> Tensor:
        """The factor on M's columns, r x columns."""
        return self.left.T if self.transposed else self.right

    @property
    def rows_kept(self) -> Kept | None:
        return self.right_kept if self.transposed else self.left_kept

    @property
    def columns_kept(self) -> Kept | None:
        return self.left_kept if self.transposed else self.right_kept

    def unpack(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Kept entries as layers give them (..., r, kept) -> (gradient of L, gradient of R), zero where masked."""
        left_part, right_part = (columns, rows) if self.transposed else (rows, columns)
        m, n = self.left.shape[0], self.right.shape[1]
        left_indices = None if self.left_kept is None else self.left_kept.indices
        right_indices = None if self.right_kept is None else self.right_kept.indices
        return spread(left_part, left_indices, m).mT, spread(right_part, right_indices, n)


def spread(values: Tensor, indices: Tensor | None, size: int) -> Tensor:
    """Kept entries (..., r, kept) -> all `size` of them, zero where masked. `indices`: (kept) or (k, 1, kept)."""
    if indices is None:
        return values
    return values.new_zeros(*values.shape[:-1], size).scatter(-1, indices.expand_as(values), values)


def lift(
    left: Tensor, right: Tensor, d_left: Tensor, d_right: Tensor, *, transposed: bool, rows: slice = slice(None)
) -> Tensor:
    """Eq. 1: dW = dL R + L dR - L L^T dL R, in M's orientation; of it these rows alone."""
    # (dL - L L^T dL) R + L dR as one product of inner size 2r.
    tangent = d_left - left @ (left.mT @ d_left)
    tall, wide = torch.cat([tangent, left], dim=-1), torch.cat([right, d_right], dim=-2)
    return wide[..., rows].mT @ tall.mT if transposed else tall[..., rows, :] @ wide


def _mask(kept: Kept | None, size: int, device: torch.device) -> Tensor:
    return torch.ones(size, dtype=torch.bool, device=device) if kept is None else kept.place >= 0
