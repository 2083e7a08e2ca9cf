"""The record of one projected weight's subspace, and the lift from it back to the weight (Eq. 1).

A parameter is seen as a matrix M = parameter.flatten(1), rows x columns. The paper's W has its inputs first, so for a
layer that stores outputs first (`nn.Linear`) W is the transpose of M; `transposed` says so. L, R and the lift are in
the paper's orientation; layers, which only ever meet M, ask for `row_factor` and `column_factor`.

Shapes: m, n = W's rows and columns; r = rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Subspace:
    """L (m x r, orthonormal columns), R (r x n, orthonormal rows) and the indices that are trained (None = all)."""

    left: Tensor
    right: Tensor
    left_kept: Tensor | None
    right_kept: Tensor | None
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
    def rows_kept(self) -> Tensor | None:
        return self.right_kept if self.transposed else self.left_kept

    @property
    def columns_kept(self) -> Tensor | None:
        return self.left_kept if self.transposed else self.right_kept

    def unpack(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Kept entries as layers give them (..., r, kept) -> (gradient of L, gradient of R), zero where masked."""
        full_rows = _scatter(rows, self.rows_kept, self.row_factor.shape[0])
        full_columns = _scatter(columns, self.columns_kept, self.column_factor.shape[1])
        if self.transposed:
            return full_columns.mT, full_rows
        return full_rows.mT, full_columns

    def lift(self, d_left: Tensor, d_right: Tensor) -> Tensor:
        """Eq. 1: dW = dL R + L dR - L L^T dL R, returned in M's orientation."""
        # (dL - L L^T dL) R + L dR: the same sum with one product of full size fewer.
        tangent = d_left - self.left @ (self.left.T @ d_left)
        lifted = tangent @ self.right + self.left @ d_right
        return lifted.T if self.transposed else lifted


def _mask(kept: Tensor | None, size: int, device: torch.device) -> Tensor:
    if kept is None:
        return torch.ones(size, dtype=torch.bool, device=device)
    return torch.zeros(size, dtype=torch.bool, device=device).index_fill(0, kept, True)


def _scatter(values: Tensor, kept: Tensor | None, size: int) -> Tensor:
    if kept is None:
        return values
    return values.new_zeros(*values.shape[:-1], size).index_copy(-1, kept, values)
