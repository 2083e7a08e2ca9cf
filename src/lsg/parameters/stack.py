"""Stacks: same-shaped projected weights, decomposed, masked and lifted in batched kernels, a chunk at a time."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lsg.distributed.group import Group
from lsg.methods import Method
from lsg.parameters.matrix_chunks import Matrices, per_chunk
from lsg.parameters.sharded_matrix_chunks import ShardedMatrices
from lsg.parameters.slot import Slot
from lsg.subspace.decompose import decompose, gaussian
from lsg.subspace.importance import column_importance, row_importance, spread_taps, top_indices, top_units
from lsg.subspace.space import Kept, Subspace, lift, spread

Units = tuple[Tensor, Tensor] | None


class Stack:
    """Projected slots of one shape, dtype, device and layout, all sharded over `group` or none."""

    def __init__(self, slots: list[Slot], group: Group) -> None:
        assert slots[0].layout is not None
        self.slots, self.layout, self._group = slots, slots[0].layout, group
        self._factors: tuple[Tensor, Tensor]  # L (k, m, r) and R (k, r, n)
        self._kept: tuple[Units, Units] = (None, None)  # indices and places (k, ...) on L's rows and on R's columns
        self._lifted_sparsity = 0.0  # of a mask on the lifted gradient ("direct")

    def refresh(self, method: Method, sparsity: float, generator: torch.Generator) -> None:
        """Subspaces and masks of this step, from the weights alone."""
        assert method.rank is not None
        matrices = self._matrices()
        left, right = decompose(matrices.mT if self.layout.transposed else matrices, method.rank, generator)
        self._factors = left, right
        if method.importance == "direct":
            self._lifted_sparsity = sparsity
        else:
            self._kept = self._important(method, sparsity, matrices, generator)
        kept_left, kept_right = (self._records(units) for units in self._kept)
        parts = zip(self.slots, _apart(left), _apart(right), kept_left, kept_right, strict=True)
        for slot, slot_left, slot_right, on_left, on_right in parts:
            slot.subspace = Subspace(slot_left, slot_right, on_left, on_right, self.layout.transposed)

    def _matrices(self) -> Matrices | ShardedMatrices:
        if self.slots[0].sharded:
            return ShardedMatrices(self.slots, self._group)
        return Matrices([slot.value.flatten(1) for slot in self.slots], self.slots[0].dtype)

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """L and R of all slots, None before the first refresh."""
        return getattr(self, "_factors", None)

    def _important(
        self, method: Method, sparsity: float, matrices: Matrices | ShardedMatrices, generator: torch.Generator
    ) -> tuple[Units, Units]:
        """The units that are kept, on L's rows and on R's columns."""
        left, right = self._factors
        taps = self.layout.taps
        if method.importance == "factor":
            factors = (right.mT, left.mT) if self.layout.transposed else (left, right)
            rows, columns = row_importance(factors[0]), column_importance(factors[1], taps)
        else:
            rows, columns = matrices.importance(taps)
        if method.importance == "random":
            rows, columns = (gaussian(tuple(score.shape), score, generator) for score in (rows, columns))
        kept_rows = top_units(rows, sparsity)
        kept_columns = spread_taps(top_units(columns, sparsity), taps)
        return (kept_columns, kept_rows) if self.layout.transposed else (kept_rows, kept_columns)

    def _records(self, units: Units) -> list[Kept | None]:
        """One for each slot."""
        if units is None:
            return [None] * len(self.slots)
        indices, place = units
        return [Kept(i, p) for i, p in zip(_apart(indices), _apart(place.to(torch.int32)), strict=True)]

    @property
    def dimensions(self) -> int:
        return sum(slot.dimensions for slot in self.slots)

    def lift(self, vector: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """This stack's share of a noisy sum -> each slot with the gradient of its weight's own rows, made a chunk at a
        time."""
        dtype = self._factors[0].dtype
        vectors = vector.view(len(self.slots), -1).to(dtype)
        alike = all(slot.own_rows == self.slots[0].own_rows for slot in self.slots)  # but for parts of a fused weight
        size = per_chunk(self.slots[0].shape, dtype) if alike else 1
        for start in range(0, len(self.slots), size):
            yield from self._lift(vectors, slice(start, start + size))

    def _lift(self, vectors: Tensor, chunk: slice) -> Iterator[tuple[Slot, Tensor]]:
        left, right = (factor[chunk] for factor in self._factors)
        (_, r, kept_rows), (_, _, kept_columns) = self.slots[0].shapes(1)
        on_rows, on_columns = vectors[chunk].split([r * kept_rows, r * kept_columns], dim=1)
        parts = on_rows.unflatten(1, (r, kept_rows)), on_columns.unflatten(1, (r, kept_columns))
        on_left, on_right = reversed(parts) if self.layout.transposed else parts
        left_kept, right_kept = (None if units is None else units[0][chunk].unsqueeze(1) for units in self._kept)
        d_left = spread(on_left, left_kept, left.shape[1]).mT
        d_right = spread(on_right, right_kept, right.shape[2])
        rows = self.slots[chunk][0].own_rows
        lifted = lift(left, right, d_left, d_right, transposed=self.layout.transposed, rows=rows)
        for slot, gradient in zip(self.slots[chunk], lifted.unbind(), strict=True):
            own = gradient.view(rows.stop - rows.start, *slot.shape[1:])
            yield slot, _largest_weights_alone(own, slot, self._lifted_sparsity) if self._lifted_sparsity else own


def _largest_weights_alone(gradient: Tensor, slot: Slot, sparsity: float) -> Tensor:
    """The lifted gradient where the weight, which no step has moved since the refresh, is large; zero elsewhere."""
    kept = top_indices(slot.value.abs().flatten(), sparsity)
    if kept is None:
        return gradient
    flat = gradient.flatten()
    return torch.zeros_like(flat).index_copy(0, kept, flat[kept]).view_as(gradient)


def _apart(stack: Tensor) -> list[Tensor]:
    """The entries of a stack, each at a multiple of 16 bytes, which compiled code may take for granted."""
    return [t if t.storage_offset() * t.element_size() % 16 == 0 else t.clone() for t in stack.unbind()]


def make_stacks(slots: Iterable[Slot], group: Group | None = None) -> list[Stack]:
    """Group projected slots by what lets them share kernels. group: the ranks that sharded weights are on."""
    groups: dict[tuple[object, ...], list[Slot]] = defaultdict(list)
    for slot in slots:
        if slot.layout is not None:
            groups[(slot.layout, tuple(slot.shape), slot.parameter.dtype, slot.device, slot.sharded)].append(slot)
    return [Stack(alike, group or Group()) for alike in groups.values()]
