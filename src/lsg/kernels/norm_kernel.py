"""Triton kernel for per-sample gradients of a layer norm's scale and shift; importable without Triton.

The reference (`norm_reference.py`) takes five passes over memory of the input's size. Here input and gradient are read
once, and sums are float32. A compiler fuses the reference by itself.
"""

import torch
from torch import Tensor

from lsg.kernels.optional_triton import AVAILABLE, tl, triton, untransformed, usable

if AVAILABLE:

    @triton.jit
    def _scale_and_shift(  # type: ignore[no-untyped-def]
        x, g, mean, rstd, scale_out, shift_out, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
    ):
        sample = tl.program_id(0).to(tl.int64)
        entries = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        scale = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
        shift = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
        for start in range(0, T, BLOCK_T):
            tokens = start + tl.arange(0, BLOCK_T)
            inside = (tokens[:, None] < T) & (entries[None, :] < D)
            places = (sample * T + tokens[:, None]) * D + entries[None, :]
            g_tile = tl.load(g + places, mask=inside, other=0.0).to(tl.float32)
            x_tile = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
            means = tl.load(mean + sample * T + tokens, mask=tokens < T, other=0.0)
            factors = tl.load(rstd + sample * T + tokens, mask=tokens < T, other=0.0)
            scale += g_tile * ((x_tile - means[:, None]) * factors[:, None])
            shift += g_tile
        tl.store(scale_out + sample * D + entries, tl.sum(scale, axis=0), mask=entries < D)
        tl.store(shift_out + sample * D + entries, tl.sum(shift, axis=0), mask=entries < D)


_BLOCK_D, _LARGEST_BLOCK_T = 128, 16


def is_faster(x: Tensor) -> bool:
    return usable(x) and x.numel() > 0 and untransformed()


def scale_and_shift_gradients(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """x and g (B, T, D), mean and rstd (B, T) in float32 -> both gradients, (B, D) in float32."""
    batch, tokens, width = x.shape
    x, g, mean, rstd = (t.contiguous() for t in (x, g, mean, rstd))
    scale, shift = (torch.empty(batch, width, dtype=torch.float32, device=x.device) for _ in range(2))
    block_t = min(_LARGEST_BLOCK_T, triton.next_power_of_2(tokens))
    with torch.cuda.device_of(x):
        _scale_and_shift[(batch, triton.cdiv(width, _BLOCK_D))](
            x, g, mean, rstd, scale, shift, tokens, width, BLOCK_T=block_t, BLOCK_D=_BLOCK_D, num_warps=4
        )
    return scale, shift
