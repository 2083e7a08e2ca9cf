"""Clean operations around PyTorch's own layers: attention, convolutions, norms, checkpoints, weights used by hand."""

import random

import torch
import torch.nn.functional as F_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.adversarial.ops import Op, clean


@clean
class Attention(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.MultiheadAttention(F, 1, batch_first=True)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        padding = None if mask is None else ~mask.expand(len(h), -1)
        return h + self.layer(h, h, h, key_padding_mask=padding, need_weights=False)[0]


@clean
class OwnAttention(Op):
    """Query, key and value by hand; the mask is added to the scores."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.qkv, self.out = nn.Linear(F, 3 * F), nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = q @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(1), -9.0)
        return h + self.out(scores.softmax(-1) @ v)


@clean
class Convolution(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Conv1d(F, F, rng.choice([1, 3]), padding="same")

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h.mT).mT


@clean
class ConvolutionOfRows(Op):
    """Records and positions folded together, features as the axis of the convolution."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h.reshape(-1, 1, h.shape[-1])).reshape(h.shape)


@clean
class Groups(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer, self.fold = nn.GroupNorm(1, F), rng.random() < 0.5

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h.reshape(-1, h.shape[-1])).view_as(h) if self.fold else self.layer(h.mT).mT


@clean
class NormOfRecord(Op):
    """Over positions and features at once."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.LayerNorm((T, F))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


@clean
class Checkpointed(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Sequential(nn.Linear(F, F), nn.Tanh(), nn.Linear(F, F))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return checkpoint(self.layer, h, use_reentrant=False)


@clean
class NoDropout(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Sequential(nn.Linear(F, F), nn.Dropout(0.0), nn.GELU())

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


@clean
class WeightUsedByHand(Op):
    """Outside its module's forward."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return F_.linear(h, self.layer.weight)


@clean
class RelativeTable(Op):
    """DeBERTa's: a table of relative positions goes through a layer as it is, for all records at once."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.table, self.layer = nn.Embedding(T, F), nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return h + self.layer(self.table.weight)[: h.shape[1]]


@clean
class MaskedByHand(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        h = self.layer(h)
        return h if mask is None else torch.where(mask.unsqueeze(-1), h, 0.0)
