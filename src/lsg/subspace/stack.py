"""Stacks: same-shaped projected weights, decomposed, masked and lifted together in batched kernels."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lsg.layers.slot import Slot
from lsg.methods import Method
from lsg.subspace.decompose import decompose, gaussian
from lsg.subspace.importance import column_importance, row_importance, spread_taps, top_indices
from lsg.subspace.space import Kept, Subspace, lift, spread


class Stack:
    """Projected slots of one shape, dtype, device and layout."""

    def __init__(self, slots: list[Slot]) -> None:
        assert slots[0].layout is not None
        self.slots, self.layout = slots, slots[0].layout
        self._factors: tuple[Tensor, Tensor]  # L (k, m, r) and R (k, r, n)
        self._kept: tuple[Tensor | None, Tensor | None] = (None, None)  # indices (k, kept) on L's rows, R's columns

    def refresh(self, method: Method, sparsity: float, generator: torch.Generator) -> None:
        """Subspaces and masks of this step, from the weights alone."""
        assert method.rank is not None
        matrices = torch.stack([slot.value.flatten(1) for slot in self.slots]).to(self.slots[0].dtype)
        left, right = decompose(matrices.mT if self.layout.transposed else matrices, method.rank, generator)
        self._factors = left, right
        if method.importance == "direct":
            for slot, matrix in zip(self.slots, matrices, strict=True):
                slot.lifted_kept = top_indices(matrix.abs().flatten(), sparsity)
        else:
            self._kept = self._important(method, sparsity, matrices, generator)
        sizes = left.shape[1], right.shape[2]
        kept_left, kept_right = (_kept_records(k, s) for k, s in zip(self._kept, sizes, strict=True))
        parts = zip(self.slots, left.unbind(), right.unbind(), _each(kept_left), _each(kept_right), strict=False)
        for slot, slot_left, slot_right, on_left, on_right in parts:
            slot.subspace = Subspace(slot_left, slot_right, on_left, on_right, self.layout.transposed)

    def _important(
        self, method: Method, sparsity: float, matrices: Tensor, generator: torch.Generator
    ) -> tuple[Tensor | None, Tensor | None]:
        """Indices of the units that are kept, on L's rows and on R's columns."""
        left, right = self._factors
        taps = self.layout.taps
        rows, columns = row_importance(matrices), column_importance(matrices, taps)
        if method.importance == "factor":
            factors = (right.mT, left.mT) if self.layout.transposed else (left, right)
            rows, columns = row_importance(factors[0]), column_importance(factors[1], taps)
        elif method.importance == "random":
            rows, columns = (gaussian(tuple(score.shape), score, generator) for score in (rows, columns))
        kept_rows = top_indices(rows, sparsity)
        kept_columns = spread_taps(top_indices(columns, sparsity), taps)
        return (kept_columns, kept_rows) if self.layout.transposed else (kept_rows, kept_columns)

    @property
    def dimensions(self) -> int:
        return sum(slot.dimensions for slot in self.slots)

    def lift(self, vector: Tensor) -> Iterable[tuple[Slot, Tensor]]:
        """This stack's share of a noisy sum -> each slot with the gradient of its weight."""
        left, right = self._factors
        vectors = vector.view(len(self.slots), -1).to(left.dtype)
        (_, r, rows), (_, _, columns) = self.slots[0].shapes(1)
        on_rows, on_columns = vectors.split([r * rows, r * columns], dim=1)
        parts = on_rows.unflatten(1, (r, rows)), on_columns.unflatten(1, (r, columns))
        on_left, on_right = reversed(parts) if self.layout.transposed else parts
        left_kept, right_kept = (None if k is None else k.unsqueeze(1) for k in self._kept)
        d_left = spread(on_left, left_kept, left.shape[1]).mT
        d_right = spread(on_right, right_kept, right.shape[2])
        lifted = lift(left, right, d_left, d_right, transposed=self.layout.transposed)
        for slot, gradient in zip(self.slots, lifted.unbind(), strict=True):
            if slot.lifted_kept is not None:
                flat = gradient.flatten()
                gradient = torch.zeros_like(flat).index_copy(0, slot.lifted_kept, flat[slot.lifted_kept])
            yield slot, gradient.view(slot.value.shape)


def _kept_records(indices: Tensor | None, size: int) -> list[Kept] | None:
    if indices is None:
        return None
    order = torch.arange(indices.shape[1], device=indices.device).expand_as(indices)
    place = torch.full((indices.shape[0], size), -1, device=indices.device).scatter(1, indices, order)
    return [Kept(i, p) for i, p in zip(indices.unbind(), place.to(torch.int32).unbind(), strict=True)]


def _each(kept: list[Kept] | None) -> Iterable[Kept | None]:
    """One for each slot, or None for ever."""
    while kept is None:
        yield None
    yield from kept


def make_stacks(slots: Iterable[Slot]) -> list[Stack]:
    """Group projected slots by what lets them share kernels."""
    groups: dict[tuple[object, ...], list[Slot]] = defaultdict(list)
    for slot in slots:
        if slot.layout is not None:
            groups[(slot.layout, tuple(slot.value.shape), slot.parameter.dtype, slot.parameter.device)].append(slot)
    return [Stack(group) for group in groups.values()]


@torch.no_grad()
def refresh(
    stacks: Sequence[Stack], slots: Iterable[Slot], method: Method, step: int, generator: torch.Generator
) -> None:
    """Give every slot the subspace and masks of this step. Reads weights, which are private already; never data."""
    sparsity = method.sparsity_at(step)
    with torch.autocast(generator.device.type, enabled=False):  # a forward under autocast may ask for this
        for stack in stacks:
            stack.refresh(method, sparsity, generator)
        for slot in slots:
            if slot.maskable:
                slot.elements_kept = _kept_elements(slot, method, sparsity, generator)


def _kept_elements(slot: Slot, method: Method, sparsity: float, generator: torch.Generator) -> Tensor | None:
    scores = slot.value.abs().flatten()
    if method.importance == "random":
        scores = gaussian(tuple(scores.shape), scores.float(), generator)
    return top_indices(scores, sparsity)
