"""The per-sample products of convolutions in PyTorch's operations: what `conv_kernel.py` replaces."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lsg.kernels.factor_gradient import select


def patch_products(
    h: Tensor,
    x: Tensor,
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    kept: Tensor | None = None,
) -> Tensor:
    """sum_o h[r, o] x[c, o*stride + tap*dilation - padding] -> (B, r, kept of c*taps), spreading h (r channels), not x.

    kept: the indices of the entries that stay (None: all).
    """
    (batch, r, *_), (channels, *in_sizes) = h.shape, x.shape[1:]
    on_input = _on_input_positions(h, taps, stride, padding, dilation, in_sizes)
    for dim, (size, step) in enumerate(zip(in_sizes, dilation, strict=True), start=2):
        on_input = on_input.unfold(dim, size, step)  # a window of the input's size for each tap, the last one first
    count = math.prod(taps)
    spread = on_input.reshape(batch, r * count, math.prod(in_sizes))
    products = (spread @ x.flatten(2).mT).reshape(batch, r, count * channels)  # by tap, the last one first, and channel
    if kept is None:
        return torch.unflatten(products, 2, (count, channels)).flip(2).mT.flatten(2)
    return select(products, (count - 1 - kept % count) * channels + kept // count)


def _on_input_positions(
    h: Tensor,
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    in_sizes: Sequence[int],
) -> Tensor:
    """Puts h at the input positions o*stride, and zeros around it as far as taps reach beyond the input's edges."""
    if any(step != 1 for step in stride):
        spread = h.new_zeros(*h.shape[:2], *((n - 1) * s + 1 for n, s in zip(h.shape[2:], stride, strict=True)))
        grid: tuple[Any, ...] = tuple(slice(None, None, s) for s in stride)
        spread[(..., *grid)] = h
        h = spread
    margins: list[int] = []  # before and behind, the last dimension first, as `F.pad` wants them
    for size, k, p, d, n in zip(in_sizes, taps, padding, dilation, h.shape[2:], strict=True):
        reach = (k - 1) * d
        margins = [reach - p, size + p - n, *margins]
    return F.pad(h, margins)
