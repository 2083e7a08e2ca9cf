"""A batch of records as the adversary handles it: take one out, leave one out, break one, replace one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """What a training loop gives to the model (`args`, `kwargs`) and to the loss (`targets`) for some records.

    Tensors have the record first, but for those named in `shared` (by position or keyword): all records use them.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    targets: Any = None
    shared: frozenset[int | str] = frozenset()

    @property
    def size(self) -> int:
        own = [value for key, value in self._inputs() if key not in self.shared and isinstance(value, Tensor)]
        return len(own[0])

    def _inputs(self) -> list[tuple[int | str, Any]]:
        return [*enumerate(self.args), *self.kwargs.items()]

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every tensor that has records changed."""

        def changed(key: int | str, value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) and key not in self.shared else value

        args = tuple(changed(i, value) for i, value in enumerate(self.args))
        kwargs = {key: changed(key, value) for key, value in self.kwargs.items()}
        targets = change(self.targets) if isinstance(self.targets, Tensor) else self.targets
        return replace(self, args=args, kwargs=kwargs, targets=targets)

    def clone(self) -> Batch:
        """Models may write to their inputs: everybody gets a copy."""
        return self.each(Tensor.clone)

    def one(self, i: int) -> Batch:
        """Record i alone, with a leading dimension of 1."""
        return self.each(lambda t: t[i : i + 1].clone())

    def without(self, i: int) -> Batch:
        return self.each(lambda t: torch.cat([t[:i], t[i + 1 :]]))

    def with_copy(self, i: int, source: int) -> Batch:
        """Record i replaced by the one at `source`."""

        def copied(t: Tensor) -> Tensor:
            t = t.clone()
            t[i] = t[source]
            return t

        return self.each(copied)

    def broken(self, i: int) -> Batch:
        """Record i is NaN, wherever it is made of floating-point numbers. Targets stay."""

        def spoilt(t: Tensor) -> Tensor:
            t = t.clone()
            if t.is_floating_point():
                t[i] = torch.nan
            return t

        return replace(self.each(spoilt), targets=self.targets)

    @property
    def breakable(self) -> bool:
        """Whether `broken` changes anything."""
        inputs = [value for key, value in self._inputs() if key not in self.shared]
        return any(isinstance(value, Tensor) and value.is_floating_point() for value in inputs)


def batch(*args: Any, targets: Any = None, shared: tuple[int | str, ...] = (), **kwargs: Any) -> Batch:
    return Batch(args, kwargs, targets, frozenset(shared))
