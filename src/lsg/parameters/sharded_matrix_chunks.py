"""Same-shaped weights whose rows are shared out over the ranks; out one stack that is read as if it were whole.

Each rank multiplies its own rows. What travels are products as thin as the subspace, r (m + n) numbers a weight, and
the scores of rows and columns: a whole weight is never put together. All ranks get the same numbers, to the bit.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lsg.distributed.group import Group
from lsg.parameters.matrix_chunks import Matrices
from lsg.parameters.slot import Slot


class ShardedMatrices:
    """k matrices of one shape, read as (k, rows, columns) in the slots' precision."""

    def __init__(self, slots: Sequence[Slot], group: Group) -> None:
        first = slots[0]
        self.dtype, self.device, self._group = first.dtype, first.device, group
        self.shape = torch.Size((len(slots), first.shape[0], first.shape[1:].numel()))
        # Slots of which this rank has the same rows go together; parts of one fused weight lie in different rows.
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, slot in enumerate(slots):
            alike[slot.own_rows.start, slot.own_rows.stop].append(number)
        self._own = [
            (numbers, slice(start, stop), Matrices([slots[i].own.flatten(1) for i in numbers], self.dtype, self.device))
            for (start, stop), numbers in alike.items()
            if stop > start
        ]

    def __matmul__(self, right: Tensor) -> Tensor:
        """right: (k, columns, r)."""
        found = right.new_zeros(*self.shape[:2], right.shape[-1])
        for numbers, rows, matrices in self._own:
            found[numbers, rows] = matrices @ right[numbers]
        return self._group.sum(found)  # the others have zeros in this rank's rows

    @property
    def mT(self) -> "_Transposed":  # noqa: N802 -- a tensor's own word
        return _Transposed(self)

    def times_transposed(self, left: Tensor) -> Tensor:
        """left: (k, rows, r) -> (k, columns, r)."""
        found = left.new_zeros(self.shape[0], self.shape[2], left.shape[-1])
        for numbers, rows, matrices in self._own:
            found[numbers] = matrices.mT @ left[numbers, rows]
        return self._group.sum(found)

    def importance(self, taps: int) -> tuple[Tensor, Tensor]:
        """Of rows (k, rows) and of columns, `taps` neighbouring ones together."""
        stack, rows, columns = self.shape
        found = torch.zeros(stack, rows + columns // taps, dtype=self.dtype, device=self.device)
        for numbers, mine, matrices in self._own:
            on_rows, on_columns = matrices.importance(taps)
            found[numbers, mine] = on_rows
            found[numbers, rows:] = on_columns
        on_rows, on_columns = self._group.sum(found).tensor_split([rows], dim=-1)
        return on_rows, on_columns


class _Transposed:
    """The same matrices, each transposed."""

    def __init__(self, matrices: ShardedMatrices) -> None:
        self.mT = matrices
        self.dtype, self.device = matrices.dtype, matrices.device
        stack, rows, columns = matrices.shape
        self.shape = torch.Size((stack, columns, rows))

    def __matmul__(self, right: Tensor) -> Tensor:
        return self.mT.times_transposed(right)


def gathered(slot: Slot, group: Group) -> Tensor:
    """The whole weight of a slot, from all ranks' rows."""
    if not slot.sharded:
        return slot.value
    whole = torch.zeros(slot.shape, dtype=slot.parameter.dtype, device=slot.device)
    whole[slot.own_rows] = slot.own.to(slot.device)
    return group.sum(whole)
