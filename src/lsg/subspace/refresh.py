"""Once per logical step: weights in, each slot's subspace and kept indices out. Same-shaped weights go as one stack."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lsg.layers.slot import Slot
from lsg.methods import Method
from lsg.subspace.decompose import decompose, gaussian
from lsg.subspace.importance import column_importance, row_importance, spread_taps, top_indices
from lsg.subspace.space import Subspace


@torch.no_grad()
def refresh(slots: Sequence[Slot], method: Method, step: int, generator: torch.Generator) -> None:
    """Give every slot the subspace and masks of this step. Reads weights, which are private already; never data."""
    with torch.autocast(slots[0].parameter.device.type, enabled=False):  # a forward under autocast asks for this
        _refresh(slots, method, method.sparsity_at(step), generator)


def _refresh(slots: Sequence[Slot], method: Method, sparsity: float, generator: torch.Generator) -> None:
    stacks: dict[tuple[object, ...], list[Slot]] = defaultdict(list)
    for slot in slots:
        if slot.layout is not None:
            value = slot.value
            stacks[(slot.layout, tuple(value.shape), slot.dtype, value.device)].append(slot)
        elif slot.maskable:
            slot.elements_kept = _kept_elements(slot, method, sparsity, generator)
    for stack in stacks.values():
        _project_stack(stack, method, sparsity, generator)


def _project_stack(slots: list[Slot], method: Method, sparsity: float, generator: torch.Generator) -> None:
    layout = slots[0].layout
    assert layout is not None and method.rank is not None
    matrices = torch.stack([slot.value.flatten(1).to(slot.dtype) for slot in slots])
    weights = matrices.mT if layout.transposed else matrices
    left, right = decompose(weights, method.rank, generator)
    row_factor, column_factor = (right.mT, left.mT) if layout.transposed else (left, right)
    kept: list[Tensor | None] = [None, None]
    if method.importance != "direct":
        scores = _scores(method, matrices, row_factor, column_factor, layout.taps, generator)
        row_units, column_units = (top_indices(score, sparsity) for score in scores)
        kept = [row_units, spread_taps(column_units, layout.taps)]
    left_kept, right_kept = reversed(kept) if layout.transposed else kept
    for i, slot in enumerate(slots):
        pick = [None if indices is None else indices[i] for indices in (left_kept, right_kept)]
        slot.subspace = Subspace(left[i], right[i], pick[0], pick[1], layout.transposed)
        if method.importance == "direct":
            slot.lifted_kept = top_indices(matrices[i].abs().flatten(), sparsity)


def _scores(
    method: Method, matrices: Tensor, row_factor: Tensor, column_factor: Tensor, taps: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Importance of the rows and of the column units of each matrix of the stack."""
    if method.importance == "factor":
        return row_importance(row_factor), column_importance(column_factor, taps)
    rows, columns = row_importance(matrices), column_importance(matrices, taps)
    if method.importance == "random":
        return tuple(gaussian(tuple(score.shape), score, generator) for score in (rows, columns))  # type: ignore[return-value]
    return rows, columns


def _kept_elements(slot: Slot, method: Method, sparsity: float, generator: torch.Generator) -> Tensor | None:
    scores = slot.value.abs().flatten()
    if method.importance == "random":
        scores = gaussian(tuple(scores.shape), scores.float(), generator)
    return top_indices(scores, sparsity)
