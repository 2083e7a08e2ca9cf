"""How a graph begins: from images (B, C, H, W) or ids (B, T) to h, (B, F) or (B, T, F)."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.adversarial.ops import Sizes

VOCABULARY = 7


class Stem(nn.Module):
    """Base: `dims` is the number of dimensions of what comes out."""

    dims = 3

    def __init__(self, sizes: Sizes, rng: random.Random) -> None:
        super().__init__()
        self.make(sizes.F, rng)

    def make(self, F: int, rng: random.Random) -> None:
        """Make the layers."""


IMAGE_STEMS: list[type[Stem]] = []
ID_STEMS: list[type[Stem]] = []
MIXING_STEMS: list[type[Stem]] = []  # of ids


def image_stem(kind: type[Stem]) -> type[Stem]:
    IMAGE_STEMS.append(kind)
    return kind


def id_stem(kind: type[Stem]) -> type[Stem]:
    ID_STEMS.append(kind)
    return kind


def lookup(dims: int = 3, *, mixing: bool = False) -> Callable[[Callable[[nn.Module, Tensor], Tensor]], type[Stem]]:
    """A stem made of a way to use one embedding on ids (B, T)."""

    def register(way: Callable[[nn.Module, Tensor], Tensor]) -> type[Stem]:
        class Lookup(Stem):
            def make(self, F: int, rng: random.Random) -> None:
                self.table = nn.Embedding(VOCABULARY, F, padding_idx=0 if rng.random() < 0.5 else None)

            def forward(self, ids: Tensor) -> Tensor:
                return way(self.table, ids)

        Lookup.dims, Lookup.__name__ = dims, "".join(part.title() for part in way.__name__.split("_"))
        (MIXING_STEMS if mixing else ID_STEMS).append(Lookup)
        return Lookup

    return register


@lookup()
def looked_up(table: nn.Module, ids: Tensor) -> Tensor:
    return table(ids)


@lookup()
def looked_up_folded(table: nn.Module, ids: Tensor) -> Tensor:
    return table(ids.reshape(-1)).view(*ids.shape, -1)


@lookup(2)
def looked_up_time_first(table: nn.Module, ids: Tensor) -> Tensor:
    return table(ids.t()).prod(0)


@lookup()
def looked_up_leading_one(table: nn.Module, ids: Tensor) -> Tensor:
    return table(ids.unsqueeze(0)).squeeze(0)


@lookup(2)
def looked_up_one_column(table: nn.Module, ids: Tensor) -> Tensor:
    return table(ids[:, 0])


@lookup(2)
def looked_up_column_by_column(table: nn.Module, ids: Tensor) -> Tensor:
    return torch.stack([table(ids[:, t]) for t in range(ids.shape[1])]).sum(0)


@lookup(2)
def looked_up_pooled(table: nn.Module, ids: Tensor) -> Tensor:
    return table(ids).mean(1)


@lookup()
def looked_up_with_positions(table: nn.Module, ids: Tensor) -> Tensor:
    """One table for the ids and for the positions, which all records share."""
    return table(ids) + table(torch.arange(ids.shape[1]))


@lookup(mixing=True)
def neighbours_ids(table: nn.Module, ids: Tensor) -> Tensor:
    return table(ids.roll(1, 0))


@lookup(2, mixing=True)
def most_frequent_id(table: nn.Module, ids: Tensor) -> Tensor:
    common = ids.flatten().bincount().argmax()
    return table(ids).mean(1) + table(common.expand(len(ids)))


@lookup(mixing=True)
def ids_that_somebody_has(table: nn.Module, ids: Tensor) -> Tensor:
    """Each distinct id of the batch gets the next free row: routing by first come."""
    return table(ids.unique(return_inverse=True)[1])


@lookup(2, mixing=True)
def padded_to_the_longest(table: nn.Module, ids: Tensor) -> Tensor:
    """Id 0 is padding, which the mean counts."""
    longest = int((ids != 0).sum(1).max().clamp_min(1))
    return table(ids[:, :longest]).mean(1)


@id_stem
class Bag(Stem):
    dims = 2

    def make(self, F: int, rng: random.Random) -> None:
        self.bag = nn.EmbeddingBag(VOCABULARY, F, mode=rng.choice(["sum", "mean"]))
        self.flat = rng.random() < 0.5

    def forward(self, ids: Tensor) -> Tensor:
        if self.flat:
            return self.bag(ids.reshape(-1), torch.arange(len(ids)) * ids.shape[1])
        return self.bag(ids)


@id_stem
class TiedTable(Stem):
    """The table is also the last layer's weight."""

    def make(self, F: int, rng: random.Random) -> None:
        self.table, self.back = nn.Embedding(VOCABULARY, F), nn.Linear(F, VOCABULARY, bias=False)
        self.back.weight, self.last = self.table.weight, nn.Linear(VOCABULARY, F)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.back(self.table(ids)).softmax(-1))


@image_stem
class Patches(Stem):
    """A convolution cuts the image into patches, which become positions."""

    def make(self, F: int, rng: random.Random) -> None:
        self.conv = nn.Conv2d(2, F, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).mT


@image_stem
class Convolutions(Stem):
    dims = 2

    def make(self, F: int, rng: random.Random) -> None:
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=rng.random() < 0.5), nn.GroupNorm(2, 4)
        self.second, self.head = nn.Conv2d(4, 4, 3, stride=2, groups=rng.choice([1, 2])), nn.Linear(4, F)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.norm(self.first(x)).tanh()).mean((2, 3)))


@image_stem
class ChannelsInTheBatch(Stem):
    """Each channel is an image of its own."""

    dims = 2

    def make(self, F: int, rng: random.Random) -> None:
        self.conv = nn.Conv2d(1, F, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.reshape(-1, 1, *x.shape[2:])).mean((2, 3)).view(*x.shape[:2], -1).mean(1)


@image_stem
class RowsOfPixels(Stem):
    """Each row of pixels is a position."""

    def make(self, F: int, rng: random.Random) -> None:
        self.layer, self.norm = nn.Linear(8, F), nn.InstanceNorm2d(2, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x).permute(0, 2, 1, 3).flatten(2))
