"""What the autograd functions of layers with a weight matrix compute with, by name.

`torch.autograd.Function.apply` takes tensors one after the other. So the operands of a function are a named tuple,
whose entries are given to `apply` and which `forward` and `setup_context` put together again. In a backward the same
names say which operands need a gradient (`ctx.needs_input_grad`), and which gradient is whose. A backward returns
`tuple(gradients)`: torch.compile finds no gradients in a named tuple.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lsg.parameters.slot import Slot
from lsg.subspace.space import Kept

Operand = Any  # a tensor or None; in a backward also whether it needs a gradient, or the gradient


class Space(NamedTuple):
    """A weight's subspace: row and column factor, the indices of kept rows and columns, and where each row and column
    goes among those, -1 where masked. All None for a dense weight, indices and places where nothing is masked."""

    row_factor: Operand = None
    column_factor: Operand = None
    rows_kept: Operand = None
    rows_place: Operand = None
    columns_kept: Operand = None
    columns_place: Operand = None

    @property
    def rows(self) -> tuple[Operand, Operand]:
        return self.rows_kept, self.rows_place

    @property
    def columns(self) -> tuple[Operand, Operand]:
        return self.columns_kept, self.columns_place


class Carriers(NamedTuple):
    """A weight's carriers: those of both factors, or that of the dense weight."""

    rows: Operand = None
    columns: Operand = None
    dense: Operand = None


class WeightOperands(NamedTuple):
    """What a weight's slot adds to a layer's operands."""

    carriers: Carriers
    space: Space

    @property
    def mT(self) -> "WeightOperands":  # noqa: N802 - as PyTorch names it
        """The same for the transposed matrix: rows become columns."""
        carriers, space = self
        return WeightOperands(
            Carriers(carriers.columns, carriers.rows, _transposed(carriers.dense)),
            Space(_transposed(space.column_factor), _transposed(space.row_factor), *space.columns, *space.rows),
        )


def _transposed(matrix: Tensor | None) -> Tensor | None:
    return None if matrix is None else matrix.mT


def weight_operands(
    slot: Slot | None, dtype: torch.dtype, carrier_of: Callable[[Tensor], Tensor] = lambda carrier: carrier
) -> WeightOperands:
    """Of a weight's slot, each carrier as `carrier_of` makes it. All None without a slot."""
    if slot is None:
        return WeightOperands(Carriers(), Space())
    space, carriers = slot.subspace, [carrier_of(carrier) for carrier in slot.carriers]
    if space is None:
        return WeightOperands(Carriers(dense=carriers[0]), Space())
    kept = (*_indices(space.rows_kept), *_indices(space.columns_kept))
    return WeightOperands(Carriers(*carriers), Space(*slot.factors_as(dtype), *kept))


def _indices(kept: Kept | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if kept is None else (kept.indices, kept.place)
