"""The per-sample products of convolutions in PyTorch's operations: what `conv_kernel.py` replaces."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def patch_products(
    h: Tensor, x: Tensor, taps: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """sum_o h[r, o] x[c, o*stride + tap*dilation - padding] -> (B, r, c*taps), spreading h (r channels), not x."""
    batch, r, *out_sizes = h.shape
    in_sizes = x.shape[2:]
    # The canvas holds h at the input positions o*stride, moved by `offset` so that no tap reads before its start.
    offsets = [max(0, (k - 1) * d - p) for k, d, p in zip(taps, dilation, padding, strict=True)]
    spans = [o + (n - 1) * s + 1 for o, n, s in zip(offsets, out_sizes, stride, strict=True)]
    sizes = [max(span, o + p + i) for span, o, p, i in zip(spans, offsets, padding, in_sizes, strict=True)]
    canvas = h.new_zeros(batch, r, *sizes)
    grid: tuple[Any, ...] = tuple(slice(o, e, s) for o, e, s in zip(offsets, spans, stride, strict=True))
    canvas[(..., *grid)] = h
    shifted = []
    for tap in itertools.product(*(range(k) for k in taps)):
        starts = [o + p - t * d for o, p, t, d in zip(offsets, padding, tap, dilation, strict=True)]
        window: tuple[Any, ...] = tuple(slice(b, b + i) for b, i in zip(starts, in_sizes, strict=True))
        shifted.append(canvas[(..., *window)])
    h_Brtq = torch.stack(shifted, dim=2).flatten(3)
    products = h_Brtq.flatten(1, 2) @ x.flatten(2).mT  # (B, r*taps, c)
    return torch.unflatten(products, 1, (r, -1)).mT.flatten(2)
