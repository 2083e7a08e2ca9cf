"""Tables: which dimension of whole numbers is the record, positions that all share, bags, ties, padding."""

import torch
from torch import Tensor, nn

from tests.adversarial.cases.collection import W, case, indices


class Table(nn.Module):
    """Base: a table of 8 rows and a head."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, W, **options), nn.Linear(W, W)  # type: ignore[arg-type]


@case("right", indices(4, 3, 1))
class BatchFirst(Table):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


@case("right or refused", indices(4, 3, 2))
class FoldedIndices(Table):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids.reshape(-1)).view(len(ids), -1, W))


@case("right or refused", indices(4, 3, 2, positions=2))
class PairsTimeFirst(Table):
    def forward(self, pairs: Tensor) -> Tensor:
        return self.head(self.table(pairs.t()).prod(0))


@case("right or refused", indices(2, 2, positions=2))
class PairsTimeFirstInABatchOfTwo(PairsTimeFirst):
    pass


@case("right or refused", indices(4, 2))
class IndicesLeadingOne(Table):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids.unsqueeze(0)).squeeze(0))


@case("right", indices(4, 3, 2))
class OneIndexEach(Table):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids[:, 0]))


class WithPositions(Table):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(8, W)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) + self.positions(self.places(ids)))

    def places(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[1])


@case("right", indices(4, 5, 1))
class SharedPositions(WithPositions):
    pass


@case("right or refused", indices(3, 4, 3))
class SharedPositionsAsManyAsRecords(WithPositions):
    pass


@case("right or refused", [*indices(4, positions=3), *indices(4, positions=4), *indices(2, positions=2)])
class SharedPositionsOfAnotherLength(WithPositions):
    pass


@case("right", indices(4, 3, 1))
class PositionsLeadingOne(WithPositions):
    def places(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[1]).unsqueeze(0)


@case("right", indices(4, 3, 1))
class PositionsOfEachRecord(WithPositions):
    """From the ids themselves, as RoBERTa counts them."""

    def places(self, ids: Tensor) -> Tensor:
        return (ids != 0).long().cumsum(1)


@case("right or refused", indices(4, 3, 1))
class OnePositionForAll(WithPositions):
    def places(self, ids: Tensor) -> Tensor:
        return torch.tensor(2)


@case("right or refused", indices(3, 4, 3))
class TableSharedByIdsAndPositions(Table):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) * self.table(torch.arange(ids.shape[1])))


@case("right", indices(4, 3, 1))
class Padding(Table):
    def __init__(self) -> None:
        super().__init__(padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


@case("refused", indices(4, 3))
class ScaledByFrequency(Padding):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.table, self.head = nn.Embedding(8, W, scale_grad_by_freq=True), nn.Linear(W, W)


@case("refused", indices(4, 3))
class RowsRenormed(Padding):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.table, self.head = nn.Embedding(8, W, max_norm=1.0), nn.Linear(W, W)


@case("right", indices(4, 3, 1))
class Tied(Table):
    """The table is the last layer's weight, too: one gradient, the sum of both uses."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(W, 8, bias=False)
        self.back.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.back(self.head(self.table(ids)).tanh())


@case("right", indices(4, 3, 1))
class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(8, W, mode="mean"), nn.Linear(W, W)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


@case("right or refused", indices(4, 3, 1))
class BagWithOffsets(Bag):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids.reshape(-1), torch.arange(len(ids)) * ids.shape[1]))


@case("refused", indices(4, 3))
class BagOverTheBatch(Bag):
    """One bag of everybody's ids, which all records get."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids.reshape(1, -1)).expand(len(ids), -1) + self.table(ids))


@case("right or refused", indices(4, 3, 8, positions=4))
class WeightThroughALayer(Table):
    """DeBERTa's relative positions: the table as a matrix, through a layer; at last as many rows as records."""

    def forward(self, ids: Tensor) -> Tensor:
        relative = self.head(self.table.weight)  # (8, F)
        return self.head(self.table(ids)) @ relative.T


@case("refused", indices(4, 3))
class IndicesMixed(Table):
    """Each record looks up what its neighbour has."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids.roll(1, 0)))


@case("refused", indices(4, 3))
class MostFrequentIndex(Table):
    """Through whole numbers: the batch's most frequent id."""

    def forward(self, ids: Tensor) -> Tensor:
        common = ids.flatten().bincount(minlength=8).argmax()
        return self.head(self.table(ids) + self.table(common.expand(len(ids), 1)))
