"""Whose is what: values of a tensor in several runs in, where its samples are out.

The model runs on a few records, then again with one of them changed, and again. An entry of a tensor that changes with
a record belongs to it. Samples are where a dimension's entries change with one record each, and where a batch of
another size is longer. Nothing is taken from shapes alone, but for tensors that no record changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lsg.layers.samples import SHARED, Axis, SampleAxis

# By how much results may differ that must be equal, over the largest number of their tensor: other records may lead to
# other kernels, which round in other ways (attention with a mask or without one, say).
_HUGE = 1e6
_MOST = 0.25  # largest tolerance at any precision: what depends on the number of records differs by more
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass
class Trail:
    """A tensor at one place of a forward, and which records change each of its entries."""

    value: Tensor
    trains: bool = False  # whether a loss of it would reach trained parameters
    changed_by: Tensor | None = None  # one bit for each run, broadcasts to the value; None: no run has changed anything
    of_fewer: Tensor | None = None  # the tensor in a batch of fewer records
    reshaped: bool = False  # whether its shape depends on values of the records

    @property
    def is_turned(self) -> bool:
        """Whether the first dimension was seen to count something else than samples."""
        return self.of_fewer is not None and self.of_fewer.shape[:1] == self.value.shape[:1]

    def compare(self, other: Tensor, run: int) -> None:
        """Note, entry by entry, what a run changed."""
        differs = different(self.value, other)
        if bool(differs.any()):
            self.note(differs.to(torch.int32) << run)

    def note(self, bits: Tensor) -> None:
        """Bits of one row are kept as they are, and broadcast where entries differ."""
        self.changed_by = bits if self.changed_by is None else self.changed_by | bits

    def intact(self, axis: Axis, size: int) -> int:
        """Samples without NaN here."""
        if not self.value.is_floating_point() or not isinstance(axis, SampleAxis):
            return size
        return size - int(axis.split(self.value, size).reshape(size, -1).isnan().any(1).sum())

    def of_one_each(self, owners: Sequence[int]) -> bool:
        """Whether each entry belongs to one sample at most, wherever that is."""
        if self.reshaped or self.changed_by is None:
            return not self.reshaped
        apart = torch.zeros_like(self.changed_by, dtype=torch.bool)
        for owner in owners:
            apart |= (self.changed_by & ~owner) == 0
        return bool(apart.all())

    def depends_on_number(self, axis: Axis, size: int, fewer: int, precision: torch.dtype | None) -> bool:
        """Whether the samples that both batches have are not the same in both. precision: see `alike`."""
        if self.of_fewer is None or not isinstance(axis, SampleAxis):
            return False
        mine, theirs = axis.split(self.value, size)[:fewer], axis.split(self.of_fewer, fewer)
        return not alike(mine, theirs, 100.0, precision)


def locate(trail: Trail, size: int, owners: Sequence[int], other: int | None) -> Axis | None:
    """Where the samples are in a tensor; None where entries belong to several of them.

    owners: for each sample the bits of the runs that changed it. other: samples of the batch of fewer records.
    """
    shape = trail.value.shape
    if trail.reshaped:
        return None
    fewer = None if trail.of_fewer is None else trail.of_fewer.shape
    if other is None or fewer is None or len(fewer) != len(shape):
        grows = [dim for dim in range(len(shape)) if shape[dim] % size == 0 and shape[dim]]
        if trail.changed_by is None and shape[:1] != (size,):
            return SHARED
    else:
        grows = [dim for dim in range(len(shape)) if shape[dim] != fewer[dim]]
        if len(grows) > 1 or any(shape[dim] * other != fewer[dim] * size for dim in grows):
            return None
        if not grows:
            return SHARED if trail.changed_by is None else None
    if grows[:1] == [0] and shape[0] == size and trail.changed_by is not None and trail.changed_by.numel() == size:
        foreign = ~torch.tensor(owners, dtype=torch.int32, device=trail.changed_by.device)
        if not bool((trail.changed_by.flatten() & foreign).any()):
            return SampleAxis(0)
    for dim in grows:
        each, rest = divmod(shape[dim], size)
        if rest:
            return None
        for outer in sorted({1, each} | {k for k in range(2, each) if each % k == 0}, key=lambda k: (k != 1, -k)):
            if trail.changed_by is None or _fits(trail.changed_by.expand(shape), dim, outer, size, owners):
                return _axis(dim, outer, each // outer)
    return None


def _fits(changed_by: Tensor, dim: int, outer: int, size: int, owners: Sequence[int]) -> bool:
    """Whether each sample's entries were changed with that sample alone."""
    split = torch.unflatten(changed_by, dim, (outer, size, -1)).movedim(dim + 1, 0).reshape(size, -1)
    foreign = ~torch.tensor(owners, dtype=torch.int32, device=split.device)
    return not bool((split & foreign.unsqueeze(1)).any())


def _axis(dim: int, outer: int, inner: int) -> SampleAxis:
    """A dimension that counts more than samples may be longer in another batch."""
    if outer == 1:
        return SampleAxis(dim, 1, None if inner > 1 else 1)
    return SampleAxis(dim, None, 1) if inner == 1 else SampleAxis(dim, outer, None)


def lowered_precision(device_type: str) -> torch.dtype | None:
    """The precision of products now, if it is below their tensors' own: autocast's, or float16, as TF32 rounds so."""
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    if device_type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return torch.float16
    return None


def alike(a: Tensor, b: Tensor, factor: float = 1.0, precision: torch.dtype | None = None) -> bool:
    """Whether two tensors differ by no more than `factor` times the tolerance. One look at the largest settles most.

    precision: that of the computation, if it is below the tensors' own. Batches of other sizes take other kernels.
    """
    if a.shape != b.shape:
        return False
    if torch.equal(a, b) or not a.numel():
        return True
    if a.is_floating_point():
        largest = float(a.abs().max())
        if largest < _HUGE and float((a - b).abs().max()) <= _tolerance(a.dtype, factor, precision) * largest:
            return True
    return not bool(different(a, b, factor, precision).any())


def different(a: Tensor, b: Tensor, factor: float = 1.0, precision: torch.dtype | None = None) -> Tensor:
    """Where two tensors of one shape differ by more than `factor` times the tolerance."""
    if not (a.is_floating_point() or a.is_complex()):
        return a != b
    same = (a == b) | (a.isnan() & b.isnan())
    size = a.abs()
    # What stands for minus infinity in a mask says nothing of how large the other numbers are.
    largest = torch.where(size < _HUGE, size, 0.0).max() if size.numel() else size.sum()
    allowed = _tolerance(a.dtype, factor, precision) * torch.maximum(largest, torch.where(size < torch.inf, size, 0.0))
    return ~(same | ((a - b).abs() <= allowed))


def _tolerance(dtype: torch.dtype, factor: float, precision: torch.dtype | None) -> float:
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    lower = 0.0 if precision is None else TOLERANCE.get(precision, 0.0)
    return min(_MOST, factor * max(TOLERANCE.get(real, 0.0), lower))
