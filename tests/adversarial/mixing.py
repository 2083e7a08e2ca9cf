"""Operations without parameters in which records influence each other."""

from collections.abc import Callable

import torch
import torch.nn.functional as F_
from torch import Tensor

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
