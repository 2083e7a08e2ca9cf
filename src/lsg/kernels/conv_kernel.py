"""Triton kernel for the per-sample products of convolutions laid out channels last; importable without Triton.

For each sample the products of h (positions x ranks) with every input channel under every tap of the kernel. The
reference (`conv_reference.py`) first writes one operand out once a tap; here taps are read in place. Sums are
float32; products run in the inputs' precision, as in `factor_kernel.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lsg.kernels.factor_kernel import float32_products
from lsg.kernels.optional_triton import AVAILABLE, tl, triton, untransformed, usable

if AVAILABLE:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        h, x, place, out, OUT_H, OUT_W, H, W, R, WIDTH,
        stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
        C: tl.constexpr, TAPS: tl.constexpr, TAPS_W: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
        BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """out[b, rank, place of (channel, tap)] = sum over positions of h[b, position, rank] x[b, moved, channel]."""
        sample = tl.program_id(0).to(tl.int64)
        ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        entries = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)  # tap by tap, the channels of each
        taps, channels = entries // C, entries % C
        down = taps // TAPS_W * dilation_h - padding_h
        right = taps % TAPS_W * dilation_w - padding_w
        positions = OUT_H * OUT_W
        h += sample * positions * R
        x += sample * H * W * C
        sums = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
        for start in range(0, positions, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            h_tile = tl.load(
                h + p[None, :] * R + ranks[:, None], mask=(ranks[:, None] < R) & (p[None, :] < positions), other=0.0
            )
            row = (p // OUT_W * stride_h)[:, None] + down[None, :]
            column = (p % OUT_W * stride_w)[:, None] + right[None, :]
            inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
            inside = inside & (p[:, None] < positions) & (entries[None, :] < TAPS * C)
            x_tile = tl.load(x + (row * W + column) * C + channels[None, :], mask=inside, other=0.0)
            sums = tl.dot(h_tile, x_tile, sums, input_precision=PRECISION)
        target = channels * TAPS + taps
        if MASKED:
            target = tl.load(place + target, mask=entries < TAPS * C, other=-1)
        kept = (ranks[:, None] < R) & (entries[None, :] < TAPS * C) & (target[None, :] >= 0)
        tl.store(out + (sample * R + ranks[:, None]) * WIDTH + target[None, :], sums, mask=kept)


_LARGEST_BLOCK_R = 64
_FEWEST_SAMPLES = 64  # a program runs over all positions of a sample, so a batch has to fill the chip


def is_faster(x: Tensor, g: Tensor, groups: int) -> bool:
    """Whether a convolution of x (B, channels, height, width), with g coming back, is for this module."""
    if not (usable(x) and x.dim() == 4 and groups == 1 and untransformed()):
        return False
    if x.shape[0] < _FEWEST_SAMPLES or x.numel() == 0:
        return False
    return any(t.is_contiguous(memory_format=torch.channels_last) for t in (x, g))  # a first layer's images are not


def patch_products(
    h: Tensor,
    x: Tensor,
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    kept: Tensor | None = None,
    place: Tensor | None = None,
) -> Tensor:
    """h (B, r, *positions) and x (B, c, *space) -> (B, r, kept of c*taps) in float32.

    kept, place: indices of the entries that stay, and where each entry goes among them, -1 where masked (None: all).
    """
    h = h.to(x.dtype)  # another one where the backward runs under another autocast than the forward
    h, x = (t.contiguous(memory_format=torch.channels_last) for t in (h, x))
    (batch, r, *positions), (channels, *space) = h.shape, x.shape[1:]
    entries = channels * taps[0] * taps[1]
    width = entries if kept is None else kept.shape[0]
    out = torch.empty(batch, r, width, dtype=torch.float32, device=x.device)
    block_r = min(_LARGEST_BLOCK_R, max(16, triton.next_power_of_2(r)))
    block_p, most = (128, 32) if taps[0] * taps[1] == 1 else (64, 64)  # the fastest of a few on an H200
    block_n = min(most, max(16, triton.next_power_of_2(entries)))
    with torch.cuda.device_of(x):
        _kernel[(batch, triton.cdiv(r, block_r), triton.cdiv(entries, block_n))](
            h, x, place, out, *positions, *space, r, width, *stride, *padding, *dilation,
            C=channels, TAPS=taps[0] * taps[1], TAPS_W=taps[1], BLOCK_P=block_p, BLOCK_R=block_r, BLOCK_N=block_n,
            MASKED=place is not None, PRECISION=float32_products(), num_warps=4,
        )  # fmt: skip
    return out
