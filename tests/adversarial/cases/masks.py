"""Arguments that come and go: None, shared (1, T) or (T, T), one for each record."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.adversarial.cases.collection import W, case, masks, sequences
from tests.adversarial.records import Batch, batch


def masked(*kinds: Any, size: int = 4, positions: int = 3) -> list[Batch]:
    """One batch a kind: "none", "left out", "shared", "each"."""
    found = []
    for i, kind in enumerate(kinds):
        (x,) = sequences(size + (i % 2), positions=positions, seed=i)[0].args
        if kind == "left out":
            found.append(batch(x))
        elif kind == "none":
            found.append(batch(x, None))
        elif kind == "shared":
            found.append(batch(x, masks(1, positions, seed=i), shared=(1,)))
        else:
            found.append(batch(x, masks(len(x), positions, seed=i)))
    return found


class OwnMasked(nn.Module):
    """A module of one's own, which lsg runs record by record, with an optional mask."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(W))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x * self.scale
        return x if mask is None else x * mask.unsqueeze(-1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.masked, self.last = nn.Linear(W, W), OwnMasked(), nn.Linear(W, W)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.last(self.masked(self.first(x), mask).mean(1))


@case("right", masked("each", "each", "each"))
class MaskAlways(Masked):
    pass


@case("right or refused", masked("none", "each", "none", "each"))
class MaskNoneThenEach(Masked):
    pass


@case("right or refused", masked("left out", "each", "none"))
class MaskLeftOutThenEach(Masked):
    pass


@case("right or refused", masked("shared", "each", "shared"))
class MaskSharedThenEach(Masked):
    pass


@case("right or refused", masked("each", "shared", "none"))
class MaskEachThenShared(Masked):
    pass


@case("right or refused", masked("none", "each", size=1))
class MaskInABatchOfOneFirst(Masked):
    pass


@case("right or refused", masked("shared", "each", "each", size=3, positions=3))
class MaskAsManyPositionsAsRecords(Masked):
    pass


@case("right or refused", masked("none", "each", "shared"))
class MaskByKeyword(Masked):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.last(self.masked(self.first(x), mask=mask).mean(1))


@case("right or refused", masked("none", "each", "none"))
class MaskInAModelThatIsOneModule(OwnMasked):
    pass


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(W, 2, batch_first=True), nn.Linear(W, W)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        padding = None if mask is None else ~mask.expand(len(x), -1)
        return self.last(self.attention(x, x, x, key_padding_mask=padding)[0])


@case("right", masked("none", "each", "none"))
class AttentionMaskComesAndGoes(Attends):
    pass


@case("right or refused", sequences(3, 4, 3, positions=3))
class AttentionMaskSquare(Attends):
    """(T, T) for all records, with as many positions as records."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return self.last(self.attention(x, x, x, attn_mask=later)[0])


class OwnSquare(nn.Module):
    """Takes weights (T, T) that all records share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(W))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return weights @ x * self.scale


@case("right or refused", sequences(4, 3, 3, 5, positions=3))
class SquareThatLaterLooksLikeRecords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.square = nn.Linear(W, W), OwnSquare()

    def forward(self, x: Tensor) -> Tensor:
        return self.square(self.first(x), torch.ones(3, 3, dtype=x.dtype).tril())


@case("right or refused", sequences(3, 4, 3, positions=3))
class SquareThatLooksLikeRecordsAtFirst(SquareThatLaterLooksLikeRecords):
    pass


@case("refused", masked("none", "each", "each"))
class MixedOnceThereIsAMask(Masked):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.first(x)
        return self.last(h if mask is None else h * mask.to(h.dtype).mean(0).unsqueeze(-1))


@case("refused", masked("none", "each", "each"))
class CentredOnceThereIsAMask(Masked):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.first(x)
        return self.last(h if mask is None else h - h.mean(0))
