"""Triton kernel for `factor_gradient`; importable without Triton, where AVAILABLE is False.

One program handles one sample: it runs over p once to form a = p F^T (T x r, kept on chip), then over q once to form
a^T q, and stores the kept columns only. Sums are float32; products run in the inputs' precision (tf32 for float32
where the user allows it).
"""

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of PyTorch
    AVAILABLE = False
else:
    AVAILABLE = True

    @triton.jit
    def _factor_gradient_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
        p, factor, q, place, out,
        T, P, Q, WIDTH,
        factor_row, factor_column,
        RANK: tl.constexpr, PADDED_RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
        MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        sample = tl.program_id(0).to(tl.int64)
        p += sample * T * P
        q += sample * T * Q
        out += sample * RANK * WIDTH
        ranks = tl.arange(0, PADDED_RANK)
        for t_start in range(0, T, BLOCK_T):
            tokens = t_start + tl.arange(0, BLOCK_T)
            a = tl.zeros((BLOCK_T, PADDED_RANK), dtype=tl.float32)
            for start in range(0, P, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                tile_mask = (tokens[:, None] < T) & (columns[None, :] < P)
                p_tile = tl.load(p + tokens[:, None] * P + columns[None, :], mask=tile_mask, other=0.0)
                factor_mask = (ranks[None, :] < RANK) & (columns[:, None] < P)
                offsets = ranks[None, :] * factor_row + columns[:, None] * factor_column
                factor_tile = tl.load(factor + offsets, mask=factor_mask, other=0.0)
                a = tl.dot(p_tile, factor_tile, a, input_precision=PRECISION)
            a_rT = tl.trans(a).to(q.dtype.element_ty)
            for start in range(0, Q, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                tile_mask = (tokens[:, None] < T) & (columns[None, :] < Q)
                q_tile = tl.load(q + tokens[:, None] * Q + columns[None, :], mask=tile_mask, other=0.0)
                products = tl.dot(a_rT, q_tile, input_precision=PRECISION)
                target = columns
                if MASKED:
                    target = tl.load(place + columns, mask=columns < Q, other=-1)
                store_mask = (ranks[:, None] < RANK) & (columns[None, :] < Q) & (target[None, :] >= 0)
                where = out + ranks[:, None] * WIDTH + target[None, :]
                if t_start > 0:  # longer samples come in several token blocks; this program alone owns the sum
                    products += tl.load(where, mask=store_mask, other=0.0)
                tl.store(where, products, mask=store_mask)


@torch.library.custom_op("lsg::factor_gradient", mutates_args=())
def factor_gradient(p: Tensor, factor: Tensor, q: Tensor, place: Tensor | None, width: int) -> Tensor:
    """p (B, T, P), factor (r, P), q (B, T, Q), place (Q) or None -> (B, r, width) in float32."""
    batch, tokens, p_size = p.shape
    rank = factor.shape[0]
    out = torch.empty(batch, rank, width, dtype=torch.float32, device=p.device)
    precise = p.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    block_tokens = min(128, max(16, triton.next_power_of_2(tokens)))
    _factor_gradient_kernel[(batch,)](
        p,
        factor,
        q,
        place,
        out,
        tokens,
        p_size,
        q.shape[2],
        width,
        factor.stride(0),
        factor.stride(1),
        RANK=rank,
        PADDED_RANK=max(16, triton.next_power_of_2(rank)),
        BLOCK_T=block_tokens,
        BLOCK=64 if p.dtype != torch.float32 else 32,
        MASKED=place is not None,
        PRECISION="ieee" if precise else "tf32",
        num_warps=8,
        num_stages=4,
    )
    return out


@factor_gradient.register_fake
def _(p: Tensor, factor: Tensor, q: Tensor, place: Tensor | None, width: int) -> Any:
    return p.new_empty(p.shape[0], factor.shape[0], width, dtype=torch.float32)
