"""Clean operations: one layer, called with the records in every place and order that people put them."""

import torch
from torch import Tensor, nn

from tests.adversarial.ops import layer_op


@layer_op()
def straight(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h).tanh()


@layer_op()
def residual(layer: nn.Module, h: Tensor) -> Tensor:
    return h + layer(h)


@layer_op(3)
def folded(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.reshape(-1, h.shape[-1])).view(h.shape)


@layer_op(3)
def folded_time_first(layer: nn.Module, h: Tensor) -> Tensor:
    turned = h.transpose(0, 1)
    return layer(turned.reshape(-1, h.shape[-1])).view(turned.shape).transpose(0, 1)


@layer_op(3)
def time_first(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.transpose(0, 1)).transpose(0, 1)


@layer_op(3)
def misnamed_rows(layer: nn.Module, h: Tensor) -> Tensor:
    """(B, T, F) seen as (T, B, F): the rows in memory stay where they are."""
    return layer(h.reshape(h.shape[1], h.shape[0], h.shape[2])).reshape(h.shape)


@layer_op()
def leading_one(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.unsqueeze(0)).squeeze(0)


@layer_op()
def one_in_the_middle(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.unsqueeze(1)).squeeze(1)


@layer_op()
def two_views_one_after_the_other(layer: nn.Module, h: Tensor) -> Tensor:
    first, second = layer(torch.cat([h, h + 1])).chunk(2)
    return first * second.sigmoid()


@layer_op()
def two_views_stacked_first(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(torch.stack([h, h * 2])).mean(0)


@layer_op()
def two_views_stacked_second(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(torch.stack([h, h * 2], 1)).mean(1)


@layer_op()
def views_side_by_side(layer: nn.Module, h: Tensor) -> Tensor:
    views = h.repeat_interleave(2, 0)
    scale = torch.tensor([1.0, 2.0], dtype=h.dtype).repeat(len(h)).view(-1, *(1,) * (h.dim() - 1))
    return layer(views * scale).tanh().view(len(h), 2, *h.shape[1:]).mean(1)


@layer_op()
def views_repeated(layer: nn.Module, h: Tensor) -> Tensor:
    views = h.repeat(2, *(1,) * (h.dim() - 1))
    return layer(views).tanh().view(2, *h.shape).mean(0)


@layer_op()
def records_reversed(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.flip(0)).flip(0)


@layer_op()
def records_sorted(layer: nn.Module, h: Tensor) -> Tensor:
    """As for packed sequences: sorted by something, and back."""
    order = h.detach().flatten(1).sum(1).argsort()
    return layer(h[order])[order.argsort()]


@layer_op()
def records_picked_by_index(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h[torch.arange(len(h))])


@layer_op()
def one_by_one(layer: nn.Module, h: Tensor) -> Tensor:
    return torch.cat([layer(h[i : i + 1]) for i in range(len(h))])


@layer_op()
def one_by_one_without_dimension(layer: nn.Module, h: Tensor) -> Tensor:
    return torch.stack([layer(row) for row in h])


@layer_op()
def in_two_halves(layer: nn.Module, h: Tensor) -> Tensor:
    middle = (len(h) + 1) // 2
    return torch.cat([layer(h[:middle]), layer(h[middle:])])


@layer_op(3)
def position_by_position(layer: nn.Module, h: Tensor) -> Tensor:
    return torch.stack([layer(h[:, t]) for t in range(h.shape[1])], 1)


@layer_op(3)
def first_position(layer: nn.Module, h: Tensor) -> Tensor:
    return h + layer(h[:, 0]).unsqueeze(1)


@layer_op(3)
def pooled(layer: nn.Module, h: Tensor) -> Tensor:
    return h * layer(h.mean(1, keepdim=True)).sigmoid()


@layer_op(3)
def reused_at_other_layouts(layer: nn.Module, h: Tensor) -> Tensor:
    rows = layer(h.reshape(-1, h.shape[-1])).view(h.shape)
    return rows + layer(h.mean(1)).unsqueeze(1) + layer(h.transpose(0, 1)).transpose(0, 1)


@layer_op()
def reused_in_a_row(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(layer(h).tanh())


@layer_op(3)
def called_once_for_each_position(layer: nn.Module, h: Tensor) -> Tensor:
    state = h[:, 0]
    for t in range(h.shape[1]):
        state = layer(state + h[:, t]).tanh()
    return h + state.unsqueeze(1)


@layer_op()
def shared_row(layer: nn.Module, h: Tensor) -> Tensor:
    """A leading 1 that really is shared by all records."""
    return h + layer(torch.ones(1, h.shape[-1], dtype=h.dtype)).view(*(1,) * (h.dim() - 1), -1)


@layer_op(3)
def shared_positions(layer: nn.Module, h: Tensor) -> Tensor:
    """(T, F) for all records; T may be the number of records."""
    T, F = h.shape[1:]
    return h + layer(torch.arange(T * F, dtype=h.dtype).view(T, F) / F)


@layer_op(3)
def shared_positions_leading_one(layer: nn.Module, h: Tensor) -> Tensor:
    T, F = h.shape[1:]
    return h * layer(torch.arange(T * F, dtype=h.dtype).view(1, T, F) / F)


@layer_op()
def in_place(layer: nn.Module, h: Tensor) -> Tensor:
    h = layer(h)
    h *= 0.5
    return h.add_(1.0)


@layer_op()
def half_detached(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h) + layer(h.detach() * 2)


@layer_op(3)
def windows_in_the_batch(layer: nn.Module, h: Tensor) -> Tensor:
    """Swin's: (B, T, F) -> (B * windows, positions of one, F)."""
    windows = 2 if h.shape[1] % 2 == 0 else 1
    return layer(h.reshape(len(h) * windows, -1, h.shape[-1])).reshape(h.shape)


@layer_op(3)
def expanded(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.mean(1, keepdim=True).expand_as(h)) + h


@layer_op(3)
def gathered(layer: nn.Module, h: Tensor) -> Tensor:
    """Each record's positions in an order of its own."""
    order = h.detach().sum(-1).argsort(1).unsqueeze(-1).expand_as(h)
    return layer(h.gather(1, order))


@layer_op(3)
def pairs_of_positions(layer: nn.Module, h: Tensor) -> Tensor:
    pair = h.unsqueeze(1) * h.unsqueeze(2)  # (B, T, T, F)
    return layer(pair).mean(2)


@layer_op(3)
def pairs_first(layer: nn.Module, h: Tensor) -> Tensor:
    pair = (h.unsqueeze(1) * h.unsqueeze(2)).permute(1, 2, 0, 3)  # (T, T, B, F)
    return layer(pair).mean(0).transpose(0, 1)
