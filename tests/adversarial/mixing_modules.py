"""Modules in which records influence each other: behind gates, in training alone, over the wrong dimension."""

import random

import torch
from torch import Tensor, nn

from tests.adversarial.modules import Gate
from tests.adversarial.ops import Op, mixing


@mixing
class MeanContext(Op):
    """The batch's mean goes through a layer, as a row that all records share."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return h + self.layer(h.mean(0, keepdim=True))


@mixing
class GatedMix(Op):
    """Behind a gate that starts at zero."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.gate, self.detached = Gate(F, vector=rng.random() < 0.5), rng.random() < 0.5

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        mean = h.mean(0)
        return self.gate(h, h - (mean.detach() if self.detached else mean))


@mixing
class MixedAdapter(Op):
    """Behind the zero factor of an adapter."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.down, self.up = nn.Linear(F, 2, bias=False), nn.Linear(2, F, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        down = self.down(h)
        return h + self.up(down - down.mean(0))


@mixing
class ArgmaxOverTheBatch(Op):
    """Through whole numbers, which have no gradient: for each feature, who has the most? Then a table."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.table = nn.Embedding(64, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        first = h if h.dim() == 2 else h[:, 0]
        rank = first.detach()[:, 0].argsort().argsort()  # a record's place among the others
        row = self.table(rank)
        return h + (row if h.dim() == 2 else row.unsqueeze(1))


@mixing
class MixedBareParameter(Op):
    """A batch norm by hand, with its scale in the same module."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.scale = nn.Parameter(torch.ones(F))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return (h - h.mean(0)) * self.scale


@mixing
class RunningMean(Op):
    """Keeps a mean of its inputs from batch to batch, and uses it."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.register_buffer("mean", torch.zeros(F))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        out = h - self.mean
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * h.detach().reshape(-1, h.shape[-1]).mean(0))
        return out


@mixing
class MixedMask(Op):
    """Clean as long as no mask is given."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        h = self.layer(h)
        return h if mask is None else h * mask.to(h.dtype).mean(0).unsqueeze(-1)


@mixing
class MixedInTraining(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        h = self.layer(h)
        return h - h.mean(0) if self.training else h


@mixing
class ConvolutionOverTheBatch(Op):
    """(B, F) taken for one record of F channels and B positions."""

    dims = (2,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Conv1d(F, F, 3, padding=1)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h.T.unsqueeze(0)).squeeze(0).T


@mixing
class NormOverTheBatch(Op):
    """(B, F) taken for one record of F groups."""

    dims = (2,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.GroupNorm(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        padded = h if len(h) > 1 else torch.cat([h, torch.zeros_like(h)])  # one value has no variance
        return self.layer(padded.T.unsqueeze(0)).squeeze(0).T[: len(h)]


@mixing
class AttentionTimeFirst(Op):
    """Batch-first attention given (T, B, F): it attends over the records."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.MultiheadAttention(F, 1, batch_first=True)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        turned = h.transpose(0, 1)
        return self.layer(turned, turned, turned, need_weights=False)[0].transpose(0, 1)
