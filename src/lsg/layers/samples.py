"""Where the samples of a batch are in a tensor: an axis, found by value (`ownership.py`), and ways along it.

A rule works batch first. `split` brings a tensor of any known layout into that shape, `join` brings a result back, and
`rows` repeats what belongs to samples for layers that take several rows of a sample as rows of their batch.

Shapes: B = samples.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lsg.errors import PrivacyError


@dataclass(frozen=True)
class SampleAxis:
    """Dimension `dim` counts outer * B * inner; one of the two may be None, whatever the size leaves."""

    dim: int
    outer: int | None = 1
    inner: int | None = 1

    def factors(self, x: Tensor, size: int) -> tuple[int, int]:
        """outer and inner for a tensor in a batch of `size` samples."""
        length = x.shape[self.dim] if x.dim() > self.dim else 0
        each, rest = divmod(length, size)
        outer = each // (self.inner or 1) if self.outer is None else self.outer
        inner = each // outer if self.inner is None and outer else self.inner or 0
        if rest or not length or outer * inner != each:
            raise PrivacyError(
                f"a tensor of shape {tuple(x.shape)} came where lsg has seen samples in dimension {self.dim}, "
                f"which does not fit a batch of {size}"
            )
        return outer, inner

    def split(self, x: Tensor, size: int) -> Tensor:
        """(B, ...): the other dimensions in their order."""
        if self.dim == 0 and self.outer == 1 and x.shape[0] == size:
            return x
        outer, inner = self.factors(x, size)
        split = torch.unflatten(x, self.dim, (outer, size, inner)).movedim(self.dim + 1, 0)
        if self.inner == 1:
            split = split.squeeze(self.dim + 2)
        return split.squeeze(self.dim + 1) if self.outer == 1 else split

    def join(self, y: Tensor, x: Tensor, size: int) -> Tensor:
        """What `split(x)` became, with samples where x has them."""
        if self.dim == 0 and self.outer == 1 and x.shape[0] == size:
            return y
        if self.outer == 1:
            y = y.unsqueeze(self.dim + 1)
        if self.inner == 1:
            y = y.unsqueeze(self.dim + 2)
        return y.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)

    def parts(self, x: Tensor, size: int) -> Tensor:
        """x with its samples along dimension dim + 1, apart from what they have there: for vmap."""
        outer, inner = self.factors(x, size)
        return torch.unflatten(x, self.dim, (outer, size, inner))

    def one(self, part: Tensor) -> Tensor:
        """One sample of `parts`, as it is in a batch of one."""
        return part.flatten(self.dim, self.dim + 1)

    def collect(self, y: Tensor) -> Tensor:
        """Results (B, ...) of the samples, each as in a batch of one -> the batch's result."""
        outer = -1 if self.outer is None else self.outer
        inner = -1 if self.inner is None else self.inner
        return torch.unflatten(y, self.dim + 1, (outer, inner)).movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)

    def rows(self, values: Tensor, x: Tensor, size: int) -> Tensor:
        """(B, ...) -> one for each row of x, whose first dimension holds the samples."""
        outer, inner = self.factors(x, size)
        if outer == inner == 1:
            return values
        wide = values.view(1, size, 1, *values.shape[1:]).expand(outer, size, inner, *values.shape[1:])
        return wide.flatten(0, 2)


@dataclass(frozen=True)
class Shared:
    """The tensor is the same for all samples: each of them gets it whole, in place of a leading 1 if there is one."""

    def split(self, x: Tensor, size: int) -> Tensor:
        return x.expand(size, *(x.shape[1:] if x.dim() > 1 and x.shape[0] == 1 else x.shape))

    def join(self, y: Tensor, x: Tensor, size: int) -> Tensor:
        return y

    def collect(self, y: Tensor) -> Tensor:
        return y.squeeze(1) if y.dim() > 1 else y


@dataclass(frozen=True)
class Whole:
    """A batch of one sample: all of the tensor is its own."""

    def split(self, x: Tensor, size: int) -> Tensor:
        return x.unsqueeze(0)

    def join(self, y: Tensor, x: Tensor, size: int) -> Tensor:
        whole: Tensor = torch.ops.aten._unsafe_view(y, y.shape[1:])  # no view, which nobody could write to
        return whole

    def collect(self, y: Tensor) -> Tensor:
        return y.squeeze(0)


class Count(Whole):
    """No tensor, but a whole number that says how many samples there are: one, in a batch of one."""


Axis = SampleAxis | Shared | Whole
SHARED, WHOLE, COUNT = Shared(), Whole(), Count()


@dataclass(frozen=True)
class SamplePlaces:
    """Where the samples are in the tensors of a call: one axis for each leaf of what goes in and of what comes out."""

    inputs: tuple[Axis, ...]
    outputs: tuple[Axis, ...]

    def input(self, number: int = 0) -> Axis:
        return self.inputs[number] if self.inputs else WHOLE

    def output(self, number: int) -> Axis:
        return self.outputs[number] if self.outputs else WHOLE


ONE_SAMPLE = SamplePlaces((), ())  # everything belongs to the only sample there is


_FEW_STATES = 2  # a whole number below that may be a switch


def signature(leaves: list[Any], size: int) -> tuple[Any, ...]:
    """What a call looks like: where the samples are is known for calls that look alike, and for no others.

    Lengths do not count, so that texts of any length look alike; whether the first one is the number of samples does.
    """
    return tuple(_look(leaf, tuple(leaf.shape) if isinstance(leaf, Tensor) else (), size) for leaf in leaves)


def signature_at(leaves: list[Any], axes: tuple[Axis, ...], few: int, size: int) -> tuple[Any, ...]:
    """The signature that a call seen with `few` samples has in a batch of `size`."""
    looks = []
    for leaf, axis in zip(leaves, axes, strict=True):
        shape = list(leaf.shape) if isinstance(leaf, Tensor) else []
        if isinstance(axis, SampleAxis):
            shape[axis.dim] = shape[axis.dim] // few * size
        looks.append(_look(leaf, tuple(shape), size))
    return tuple(looks)


def _look(leaf: Any, shape: tuple[int, ...], size: int) -> Any:
    if not isinstance(leaf, Tensor):
        switch = leaf is None or isinstance(leaf, bool | str) or (isinstance(leaf, int) and abs(leaf) < _FEW_STATES)
        return leaf if switch else type(leaf)
    if not shape:
        return 0
    first = shape[0]
    return len(shape), "1" if first == 1 else "B" if first == size else "kB" if first % size == 0 else "other"


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call one after the other, those by name in their order."""
    if not kwargs and all(isinstance(argument, Tensor) for argument in args):
        return list(args)
    return pytree.tree_leaves((args, list(kwargs.values())))
