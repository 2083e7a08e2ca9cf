"""Triton kernels for group norms of images laid out channels last; importable without Triton.

PyTorch's own wants channels first: it copies its input, and whoever reads the output copies it back. A program handles
whole groups of one sample. The backward has a sample's gradients of scale and shift at no cost: the gradient of the
input needs the same sums. All arithmetic is float32. `F.group_norm` is the reference.
"""

import torch
from torch import Tensor

from lsg.kernels.optional_triton import AVAILABLE, tl, triton, untransformed, usable

if AVAILABLE:

    @triton.jit
    def _over_groups(  # type: ignore[no-untyped-def]
        sums, local, SIZE: tl.constexpr, ONE: tl.constexpr, BLOCK_C: tl.constexpr
    ):
        """Each channel's number -> the sum of those of its group, for each channel."""
        if ONE:  # all of them are of one group
            return tl.zeros((BLOCK_C,), dtype=tl.float32) + tl.sum(sums, axis=0)
        same = (local[:, None] // SIZE) == (local[None, :] // SIZE)
        return tl.sum(tl.where(same, sums[None, :], 0.0), axis=1)

    @triton.jit
    def _normalise(  # type: ignore[no-untyped-def]
        x, weight, bias, y, mean_out, rstd_out, P, C, eps,
        SIZE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
        WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ):  # fmt: skip
        sample = tl.program_id(0).to(tl.int64)
        local = tl.arange(0, BLOCK_C)
        channels = tl.program_id(1) * CHANNELS + local
        real = (local < CHANNELS) & (channels < C)
        ONE: tl.constexpr = CHANNELS == SIZE
        count = P * SIZE
        x += sample * P * C
        y += sample * P * C
        sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
        for start in range(0, P, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            inside = (p[:, None] < P) & real[None, :]
            sums += tl.load(x + p[:, None] * C + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = _over_groups(tl.sum(sums, axis=0), local, SIZE, ONE, BLOCK_C) / count
        sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
        for start in range(0, P, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            inside = (p[:, None] < P) & real[None, :]
            values = tl.load(x + p[:, None] * C + channels[None, :], mask=inside, other=0.0).to(tl.float32)
            centred = tl.where(inside, values - mean[None, :], 0.0)
            sums += centred * centred
        rstd = 1.0 / tl.sqrt(_over_groups(tl.sum(sums, axis=0), local, SIZE, ONE, BLOCK_C) / count + eps)
        tl.store(mean_out + sample * C + channels, mean, mask=real)
        tl.store(rstd_out + sample * C + channels, rstd, mask=real)
        scale = rstd
        if WEIGHT:
            scale *= tl.load(weight + channels, mask=real, other=0.0).to(tl.float32)
        shift = tl.zeros((BLOCK_C,), dtype=tl.float32)
        if BIAS:
            shift = tl.load(bias + channels, mask=real, other=0.0).to(tl.float32)
        for start in range(0, P, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            inside = (p[:, None] < P) & real[None, :]
            places = p[:, None] * C + channels[None, :]
            values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
            tl.store(y + places, (values - mean[None, :]) * scale[None, :] + shift[None, :], mask=inside)

    @triton.jit
    def _differentiate(  # type: ignore[no-untyped-def]
        g, x, weight, mean, rstd, d_x, d_weight, d_bias, P, C,
        SIZE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
        WEIGHT: tl.constexpr,
    ):  # fmt: skip
        sample = tl.program_id(0).to(tl.int64)
        local = tl.arange(0, BLOCK_C)
        channels = tl.program_id(1) * CHANNELS + local
        real = (local < CHANNELS) & (channels < C)
        ONE: tl.constexpr = CHANNELS == SIZE
        means = tl.load(mean + sample * C + channels, mask=real, other=0.0)
        factors = tl.load(rstd + sample * C + channels, mask=real, other=0.0)
        g += sample * P * C
        x += sample * P * C
        d_x += sample * P * C
        along_sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)  # of g times the normalised input
        shift_sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)  # of g
        for start in range(0, P, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            inside = (p[:, None] < P) & real[None, :]
            places = p[:, None] * C + channels[None, :]
            g_tile = tl.load(g + places, mask=inside, other=0.0).to(tl.float32)
            x_tile = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
            along_sums += g_tile * ((x_tile - means[None, :]) * factors[None, :])
            shift_sums += g_tile
        along, shift = tl.sum(along_sums, axis=0), tl.sum(shift_sums, axis=0)
        tl.store(d_weight + sample * C + channels, along, mask=real)
        tl.store(d_bias + sample * C + channels, shift, mask=real)
        w = tl.zeros((BLOCK_C,), dtype=tl.float32) + 1.0
        if WEIGHT:
            w = tl.load(weight + channels, mask=real, other=0.0).to(tl.float32)
        along = _over_groups(along * w, local, SIZE, ONE, BLOCK_C) / (P * SIZE)
        shift = _over_groups(shift * w, local, SIZE, ONE, BLOCK_C) / (P * SIZE)
        for start in range(0, P, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            inside = (p[:, None] < P) & real[None, :]
            places = p[:, None] * C + channels[None, :]
            g_tile = tl.load(g + places, mask=inside, other=0.0).to(tl.float32)
            x_tile = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
            normalised = (x_tile - means[None, :]) * factors[None, :]
            found = factors[None, :] * (g_tile * w[None, :] - shift[None, :] - normalised * along[None, :])
            tl.store(d_x + places, found, mask=inside)


_BLOCK_CHANNELS, _LARGEST_GROUP = 64, 1024
_FEWEST_SAMPLES = 64  # one program runs over all positions of a sample, so a batch has to fill the chip


def is_faster(x: Tensor, groups: int) -> bool:
    """Whether x (B, channels, height, width) is for this module."""
    if not (usable(x) and x.dim() == 4 and untransformed()):
        return False
    fits = x.numel() > 0 and x.shape[1] % groups == 0 and x.shape[1] // groups <= _LARGEST_GROUP
    return fits and x.shape[0] >= _FEWEST_SAMPLES and x.is_contiguous(memory_format=torch.channels_last)


def _blocks(x: Tensor, groups: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and how channels and positions are shared out."""
    size = x.shape[1] // groups
    channels = min(groups, max(1, _BLOCK_CHANNELS // size)) * size
    width = triton.next_power_of_2(channels)
    tile, warps = (8192, 8) if x.shape[2:].numel() * width > 8192 else (2048, 4)  # the fastest of a few on an H200
    blocks = {"SIZE": size, "CHANNELS": channels, "BLOCK_C": width, "BLOCK_P": tile // width, "num_warps": warps}
    return (x.shape[0], triton.cdiv(x.shape[1], channels)), blocks


def normalise(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """-> y, channels last and of that dtype; mean and 1 / deviation of each channel's group, (B, channels)."""
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last)
    mean, rstd = (torch.empty(*x.shape[:2], dtype=torch.float32, device=x.device) for _ in range(2))
    grid, blocks = _blocks(x, groups)
    with torch.cuda.device_of(x):
        _normalise[grid](
            x, weight, bias, y, mean, rstd, x.shape[2] * x.shape[3], x.shape[1], eps,
            WEIGHT=weight is not None, BIAS=bias is not None, **blocks,
        )  # fmt: skip
    return y, mean, rstd


def differentiate(
    g: Tensor, x: Tensor, groups: int, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of x, channels last, and a sample's of scale and shift, (B, channels) in float32."""
    g, x = (t.contiguous(memory_format=torch.channels_last) for t in (g, x))  # saved tensors may come back otherwise
    d_x = torch.empty_like(x, memory_format=torch.channels_last)
    d_weight, d_bias = (torch.empty_like(mean) for _ in range(2))
    grid, blocks = _blocks(x, groups)
    with torch.cuda.device_of(x):
        _differentiate[grid](
            g, x, weight, mean, rstd, d_x, d_weight, d_bias, x.shape[2] * x.shape[3], x.shape[1],
            WEIGHT=weight is not None, **blocks,
        )  # fmt: skip
    return d_x, d_weight, d_bias
