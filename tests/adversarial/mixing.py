"""Operations in which records influence each other, most of them without any parameter."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.adversarial.modules import Gate
from tests.adversarial.ops import Op, mixing


def mixing_op(way: Callable[[Tensor], Tensor]) -> type[Op]:
    """Makes an operation of a function of h."""

    class Mix(Op):
        def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
            return way(h)

    Mix.__name__ = "".join(part.title() for part in way.__name__.split("_"))
    return mixing(Mix)


@mixing_op
def centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


@mixing_op
def centred_detached(h: Tensor) -> Tensor:
    return h - h.mean(0).detach()


@mixing_op
def summed_up(h: Tensor) -> Tensor:
    return h.cumsum(0)


@mixing_op
def batch_softmax(h: Tensor) -> Tensor:
    return h.softmax(0)


@mixing_op
def batch_normed(h: Tensor) -> Tensor:
    rows = h.reshape(-1, h.shape[-1])
    rows = rows if len(rows) > 1 else torch.cat([rows, torch.zeros_like(rows)])  # one row has no variance
    return F_.batch_norm(rows, None, None, training=True)[: h[..., 0].numel()].view(h.shape)


@mixing_op
def rolled(h: Tensor) -> Tensor:
    return h.roll(1, 0)


@mixing_op
def shuffled(h: Tensor) -> Tensor:
    order = torch.randperm(len(h), generator=torch.Generator().manual_seed(len(h)))
    return h + 0.5 * h[order]


@mixing_op
def maximum(h: Tensor) -> Tensor:
    return h - h.max(0).values


@mixing_op
def whole_norm(h: Tensor) -> Tensor:
    return h / h.norm()


@mixing_op
def whole_norm_detached(h: Tensor) -> Tensor:
    return h / h.norm().detach()


@mixing_op
def sorted_over_the_batch(h: Tensor) -> Tensor:
    return h.sort(0).values


@mixing_op
def top_of_the_batch(h: Tensor) -> Tensor:
    """The larger half of the batch is let through: routing by capacity."""
    score = h.detach().flatten(1).sum(1)
    chosen = torch.zeros_like(score).index_fill(0, score.topk((len(h) + 1) // 2).indices, 1.0)
    return h * chosen.view(-1, *(1,) * (h.dim() - 1))


@mixing_op
def divided_by_the_number(h: Tensor) -> Tensor:
    return h / len(h)


@mixing_op
def gradient_rescaled(h: Tensor) -> Tensor:
    """The forward is clean; a hook divides the gradient by its norm over the batch."""
    if h.requires_grad:
        h = h * 1.0
        h.register_hook(lambda g: g / (g.norm() + 1e-6))
    return h


@mixing_op
def branch_on_the_batch(h: Tensor) -> Tensor:
    return h * 2.0 if float(h.detach().sum()) > 0 else h


@mixing_op
def zero_times_mean(h: Tensor) -> Tensor:
    """Nothing, unless a record is NaN: then everybody is."""
    return h + 0.0 * h.mean(0)


@mixing_op
def positions_and_records_swapped(h: Tensor) -> Tensor:
    """A view that cuts records apart."""
    return h + h.reshape(h.shape[-1], -1).mT.reshape(h.shape)


@mixing_op
def attention_over_the_batch(h: Tensor) -> Tensor:
    rows = h.transpose(0, 1) if h.dim() == 3 else h.unsqueeze(0)
    rows = (rows @ rows.mT).softmax(-1) @ rows
    return rows.transpose(0, 1) if h.dim() == 3 else rows.squeeze(0)


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


class Centring(torch.autograd.Function):
    """Nothing forward; backward, the batch's mean is taken off."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g - g.mean(0)


@mixing_op
def gradient_centred(h: Tensor) -> Tensor:
    return Centring.apply(h)


@mixing
class BackwardHooked(Op):
    """A module's backward hook rescales over the batch."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)
        self.layer.register_full_backward_hook(lambda m, d_in, d_out: tuple(map(_unit, d_in)))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


def _unit(g: Tensor | None) -> Tensor | None:
    return None if g is None else g / (g.norm() + 1e-6)


@mixing
class ForwardHooked(Op):
    """A hook centres what a layer gives."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)
        self.layer.register_forward_hook(lambda m, args, out: out - out.mean(0))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


class MixedNest(nn.Module):
    def __init__(self, F: int) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(F)), nn.Linear(F, F)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h - h.mean(0)) * self.scale


@mixing
class MixedInsideOwnModule(Op):
    """In front of a layer inside a module with a bare parameter."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = MixedNest(F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


@mixing
class MixedInsideACheckpoint(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.first, self.second = nn.Linear(F, F), nn.Linear(F, F)

    def run(self, h: Tensor) -> Tensor:
        h = self.first(h)
        return self.second(h - h.mean(0))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return checkpoint(self.run, h, use_reentrant=False)


@mixing
class PublishedMean(Op):
    """Keeps a mean of its inputs and does not use it: it is saved with the weights all the same."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.register_buffer("mean", torch.zeros(F))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * h.detach().reshape(-1, h.shape[-1]).mean(0))
        return h * 1.0


@mixing
class Remembers(Op):
    """Adds what the batch before left in an attribute."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.last: Any = 0.0

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        out = h + self.last
        self.last = h.detach().reshape(-1, h.shape[-1]).mean(0)
        return out


@mixing
class DoublyGated(Op):
    """Behind two gates in a row: neither has a gradient while the other is shut."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.inner, self.outer = Gate(F, vector=False), Gate(F, vector=True)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.outer(h, self.inner(torch.zeros_like(h), h - h.mean(0).detach()))
