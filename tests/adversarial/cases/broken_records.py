"""Records of NaN or Inf, and first batches that are too small to show anything."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.adversarial.cases.collection import Two, case, vectors
from tests.adversarial.records import Batch


def broken_first(*sizes: int, which: int = 1) -> list[Batch]:
    first, *rest = vectors(*sizes)
    return [first.broken(which), *rest]


def spoilt_by(value: float) -> list[Batch]:
    """The first batch has one infinite number."""

    def spoil(t: Tensor) -> Tensor:
        t = t.clone()
        t[1, 0] = value
        return t

    first, second = vectors(4, 3)
    return [first.each(spoil), second]


@case("right", broken_first(4, 3, 2))
class CleanWithABrokenRecord(Two):
    pass


@case("right", [*vectors(4), vectors(4)[0].broken(0), *vectors(3)])
class CleanWithABrokenRecordLater(Two):
    pass


@case("right", spoilt_by(torch.inf))
class CleanWithAnInfiniteRecord(Two):
    pass


@case("right", broken_first(1, 3, which=0))
class CleanWithNothingButABrokenRecord(Two):
    pass


@case("refused", broken_first(4, 3))
class BatchNormedWithABrokenRecord(Two):
    def between(self, h: Tensor) -> Tensor:
        return F.batch_norm(torch.cat([h, h.new_zeros(1, h.shape[1])]), None, None, training=True)[: len(h)]


@case("refused", broken_first(4, 3))
class CentredWithABrokenRecord(Two):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


@case("refused", broken_first(2, 4))
class CentredWithABrokenRecordOfTwo(CentredWithABrokenRecord):
    pass


@case("refused", spoilt_by(torch.inf))
class CentredWithAnInfiniteRecord(CentredWithABrokenRecord):
    pass


@case("refused", spoilt_by(-torch.inf))
class SoftmaxWithAnInfiniteRecord(Two):
    def between(self, h: Tensor) -> Tensor:
        return h.nan_to_num(0.0, 1.0, -1.0).softmax(0)


@case("refused", [b.broken(1).broken(0) if b.size == 2 else b for b in vectors(2, 4)])
class CentredWithNothingButBrokenRecords(CentredWithABrokenRecord):
    pass


@case("refused", vectors(1, 4, 3))
class CentredAfterABatchOfOne(CentredWithABrokenRecord):
    pass


@case("refused", vectors(1, 1, 2))
class CentredAfterTwoBatchesOfOne(CentredWithABrokenRecord):
    pass


@case("refused", vectors(4, 3))
class ZeroTimesTheMean(Two):
    """Adds nothing, until a record is NaN: then everybody is, and the whole batch is dropped."""

    def between(self, h: Tensor) -> Tensor:
        return h + 0.0 * h.mean(0)


@case("refused", vectors(4, 3))
class BranchOnABrokenRecord(Two):
    """One NaN record changes what all others get."""

    def between(self, h: Tensor) -> Tensor:
        return h * 2.0 if bool(h.isnan().any()) else h


@case("right", broken_first(4, 3))
class NaNReplaced(Two):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.nan_to_num(0.0))
