"""Where the record is: first, second, folded, behind a leading 1, several rows of one."""

import torch
from torch import Tensor, nn

from tests.adversarial.cases.collection import Two, W, case, sequences, vectors
from tests.adversarial.records import Batch


@case("right", vectors(4, 6, 1, 2))
class PlainLayers(Two):
    pass


@case("right or refused", vectors(4, 3))
class LeadingOne(Two):
    """Taken for a row that all records share, the output would be (B, B, F)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.unsqueeze(0)).squeeze(0).tanh())


def squared_error(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    """Broadcasts, if the output has a dimension too many."""
    error = (output - batch.args[0]).square().flatten(1).sum(1)
    return error.mean() if reduction == "mean" else error.sum()


@case("right or refused", vectors(6, 3), loss=squared_error)
class LeadingOneBroadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unsqueeze(0)).squeeze(0)


@case("right or refused", vectors(6, 3), loss=squared_error, reduction="mean")
class LeadingOneKept(nn.Module):
    """The user takes the row out after the loss's eyes have seen it: (1, B, F)[0]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0]


@case("right", sequences(4, 3, 1))
class Folded(Two):
    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x.reshape(-1, W))
        return rows.view(x.shape)


@case("right", sequences(3, 3, 6, positions=3))
class FoldedAsManyPositionsAsRecords(Folded):
    pass


@case("right or refused", sequences(4, 3, 2))
class FoldedTimeFirst(Two):
    def forward(self, x: Tensor) -> Tensor:
        turned = x.transpose(0, 1)
        return super().forward(turned.reshape(-1, W)).view(turned.shape).transpose(0, 1)


@case("right or refused", sequences(4, 3, 2))
class TimeFirst(Two):
    """XLNet's layout: (T, B, F) inside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@case("right or refused", sequences(3, 4, 3, positions=3))
class TimeFirstAsManyPositionsAsRecords(TimeFirst):
    pass


@case("right or refused", sequences(4, 2, positions=4))
class MisnamedRows(Two):
    """(B, T, F) seen as (T, B, F) without moving anything: for a linear layer nothing mixes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(x.shape[1], x.shape[0], W)).reshape(x.shape)


@case("right", sequences(3, 2, 5, positions=4))
class Windows(Two):
    """Swin's: windows of a record follow each other in the batch dimension, (B * windows, N, F)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(len(x) * 2, 2, W)).reshape(x.shape)


@case("right or refused", sequences(3, 2, 5, positions=4))
class WindowsFirst(Two):
    """The same, window by window instead of record by record."""

    def forward(self, x: Tensor) -> Tensor:
        B = len(x)
        windows = x.reshape(B, 2, 2, W).transpose(0, 1).reshape(2 * B, 2, W)
        return super().forward(windows).reshape(2, B, 2, W).transpose(0, 1).reshape(x.shape)


@case("right or refused", vectors(4, 3, 1))
class ViewsOneAfterTheOther(Two):
    def forward(self, x: Tensor) -> Tensor:
        first, second = super().forward(torch.cat([x, x + 1])).chunk(2)
        return first * second


@case("right or refused", vectors(4, 3, 1))
class ViewsSideBySide(Two):
    def forward(self, x: Tensor) -> Tensor:
        views = torch.stack([x, x + 1], 1).flatten(0, 1)
        return super().forward(views).view(len(x), 2, W).prod(1)


@case("right or refused", vectors(4, 2, 3))
class ViewsStackedFirst(Two):
    """(2, B, F): at a batch of two records it looks batch first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.stack([x, x + 1])).prod(0)


@case("right or refused", vectors(2, 2))
class ViewsStackedFirstInABatchOfTwo(ViewsStackedFirst):
    pass


@case("right", sequences(4, 3, positions=2))
class PairsInARow(Two):
    """A record is a pair; both go through one encoder as rows of their own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, W)).view(len(x), 2, W).prod(1)


@case("right or refused", vectors(4, 3))
class Reversed(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flip(0)).tanh().flip(0))


@case("right or refused", vectors(4, 3))
class SortedAndBack(Two):
    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.last(self.first(x[order])[order.argsort()].tanh())


@case("right or refused", vectors(4, 3))
class OneByOne(Two):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(OneByOne, self).forward(x[i : i + 1]) for i in range(len(x))])


@case("right or refused", vectors(4, 3))
class OneByOneWithoutDimension(Two):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(OneByOneWithoutDimension, self).forward(row) for row in x])


@case("right or refused", vectors(4, 3, 2))
class InHalves(Two):
    def forward(self, x: Tensor) -> Tensor:
        middle = len(x) // 2
        return self.last(torch.cat([self.first(x[:middle]), self.first(x[middle:])]).tanh())


@case("right or refused", vectors(4, 2))
class OnlyFirstRecords(Two):
    """The second layer sees a part of the batch only; the others get its input."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        keep = (x[:, :1] > 0).to(x.dtype)
        return keep * self.last(h) + (1 - keep) * h


@case("right or refused", vectors(4, 3))
class ChosenRecords(Two):
    """Boolean indexing: each record is routed by its own value, so nothing mixes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        chosen = x[:, 0] > 0
        out = h.clone()
        out[chosen] = self.last(h[chosen])
        return out


@case("right or refused", sequences(3, 4, positions=3))
class SharedPositionsThroughALayer(Two):
    """(T, F) that all records share, at first with as many positions as records."""

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.arange(3 * W, dtype=x.dtype).view(3, W) / W
        return self.last(x) + self.first(shared)


@case("right or refused", vectors(1, 4, 2))
class SharedRowThroughALayer(Two):
    """(1, F) that all records share, first in a batch of one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) * self.first(torch.ones(1, W, dtype=x.dtype))


@case("right or refused", sequences(2, 6, 1, positions=6))
class EverySizeIsTheSame(Two):
    """Reuse of one layer in several layouts, while records, positions and features coincide."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.first(x.transpose(0, 1)).transpose(0, 1) + self.first(x.mean(1)).unsqueeze(1)
        return self.last(h)
