"""A few records of a batch, as a batch: for looking at a model with some of them changed.

Which tensors among a model's inputs belong to records is told by their first dimension. Records that hold NaN are left
out. A changed record is another one of the batch, and moved a little, so that copies in the data hide nothing.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lsg.check.kept_state import tensors_in
from lsg.errors import PrivacyError

_SEED = 20240611  # of what changed records are made with


class FewRecords:
    """Inputs (args, kwargs) of a model for `count` records of a batch of `size`, and the same with some changed."""

    def __init__(self, inputs: tuple[Any, Any], size: int, count: int, *, first_alone: bool = False) -> None:
        """first_alone: of the inputs only the first is known to belong to records."""
        self._inputs, self._size, self.count, self._first_alone = inputs, size, count, first_alone
        for leaf in pytree.tree_leaves(inputs):
            if not _is_known(leaf) and next(tensors_in(leaf, set()), None) is not None:
                raise PrivacyError(
                    f"the model got an object of type {type(leaf).__name__} that holds tensors, in which lsg does not "
                    "look for records: give the model tensors, in tuples, lists, dictionaries or dataclasses"
                )
        intact = torch.ones(size, dtype=torch.bool)
        for leaf in self._of_records():
            if leaf.is_floating_point():
                bad = leaf.isnan() | (leaf == torch.inf)
                intact &= ~bad.reshape(size, -1).any(1).cpu()
        self._pool = intact.nonzero().flatten().tolist() or list(range(size))

    def batch(
        self, changed: Collection[int] = (), count: int | None = None, *, version: int = 0, broken: bool = False
    ) -> tuple[Any, Any]:
        """The first `count` records, new tensors at each call.

        version: of what changed records become. broken: they become NaN, where they can.
        """
        count = count or self.count
        generator, of_others = (torch.Generator().manual_seed(_SEED + i) for i in (0, 1 + version))
        first: list[Tensor] = []

        def few(leaf: Tensor) -> Tensor:
            if not self._belongs(leaf) or (self._first_alone and first):
                return leaf.clone()
            first.append(leaf)
            rows = [self._record(leaf, self._number(i), i >= len(self._pool), generator) for i in range(self.count)]
            if _largest_index(leaf) > 1:  # a short one, beside which others are longer
                rows[-1] = self._record(leaf, self._number(self.count - 1), True, generator, version=3)
            away = version + (self.count if len(self._pool) > self.count else 1)  # another record, where there is one
            others = [
                self._record(leaf, self._number(i + away), True, of_others, version, rows[i]) for i in range(self.count)
            ]
            if broken and leaf.is_floating_point():
                others = [torch.full_like(row, torch.nan) for row in rows]
            return torch.stack([others[i] if i in changed else rows[i] for i in range(count)])

        few_inputs: tuple[Any, Any] = mapped(few, self._inputs)
        return few_inputs

    @property
    def as_they_are(self) -> list[int]:
        """Records of the batch that are the first of the few, unchanged: all but the last, if there are enough."""
        return self._pool[: self.count - 1] if len(self._pool) >= self.count else []

    @property
    def can_break(self) -> bool:
        return any(leaf.is_floating_point() for leaf in self._of_records())

    def _number(self, i: int) -> int:
        return self._pool[i % len(self._pool)]

    def _belongs(self, leaf: Tensor) -> bool:
        return leaf.dim() > 0 and leaf.shape[0] == self._size

    def _of_records(self) -> list[Tensor]:
        found: list[Tensor] = []
        mapped(lambda leaf: found.append(leaf) or leaf if self._belongs(leaf) else leaf, self._inputs)  # type: ignore
        return found[:1] if self._first_alone else found

    def _record(
        self,
        leaf: Tensor,
        number: int,
        moved: bool,
        generator: torch.Generator,
        version: int = 0,
        unlike: Tensor | None = None,
    ) -> Tensor:
        """A record's row of an input; where it is to be moved, not quite as it is. version: in which way."""
        row = leaf[number].detach()
        if row.is_floating_point():
            row = row.nan_to_num(0.0, 0.0, -torch.inf)
        if not moved:
            return row.clone()
        noise = torch.rand(row.shape, generator=generator).to(row.device)
        known = leaf.detach()[:4]
        few_values = 0 < known[~known.isnan()].unique().numel() <= 2
        if row.is_floating_point() and not few_values:
            return _moved(row, noise.to(row.dtype))
        values = leaf.detach().reshape(-1)
        largest = _largest_index(leaf)
        if largest > 1 and version % 4 and not row.dim():  # one number for each record: a length, say
            return [row, values.min(), values.max(), (row + 1) // 2][version % 4].clone()
        if largest > 1 and version % 4:  # indices: all padding, if 0 is that; all alike; a short record
            end = row.shape[-1] // 2 if version % 4 == 3 else 0
            filler = torch.full_like(row, largest if version % 4 == 2 else 0)
            return torch.cat([row[..., :end], filler[..., end:]], -1)
        if unlike is not None and torch.equal(row, unlike):  # indices or a mask: values that occur, in other places
            picked = torch.randint(values.numel(), row.shape, generator=generator).to(row.device)
            row = values[picked]
            if torch.equal(row, unlike):  # all records of the batch have the same: a mask that masks nothing, say
                return torch.where(noise < 0.5, _flipped(row), row)
        return row.clone()


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | UserDict) or dataclasses.is_dataclass(leaf)


def _largest_index(leaf: Tensor) -> int:
    return int(leaf.max()) if not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool) else 0


def _flipped(row: Tensor) -> Tensor:
    """A mask's entries the other way round. Zeros of an integer stay: they may be indices of a table with one row."""
    if row.dtype == torch.bool:
        return ~row
    return torch.where(row == 0, 0.5 if row.is_floating_point() else 0, 0).to(row.dtype)


def _moved(row: Tensor, noise: Tensor) -> Tensor:
    """Far enough to turn what depends on it; what is not negative stays so."""
    finite = row[row.isfinite()]
    scale = finite.abs().mean() if finite.numel() else row.new_ones(())
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    other = noise.flip(-1) if row.dim() else noise
    if bool((row >= 0).all()):
        return row * (0.5 + noise) + 0.2 * scale * other
    return -2.0 * row * (0.5 + noise) + 0.4 * scale * (other - 0.5)


def mapped(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Each tensor changed, also in mappings and dataclasses that pytree does not know."""

    def inside(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, UserDict):  # transformers' BatchEncoding
            changed = copy.copy(value)
            changed.data = mapped(change, value.data)
            return changed
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            return dataclasses.replace(value, **{name: mapped(change, getattr(value, name)) for name in fields})
        return value

    return pytree.tree_map(inside, values)
