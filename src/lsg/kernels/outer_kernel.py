"""Triton kernels for `OuterProducts`; importable without Triton, where AVAILABLE is False.

Norms: a program forms one tile of the products rows^T columns, for some samples one after the other, on chip: tensor
cores multiply, float32 adds up. It squares the tile, drops what is masked, and stores one number a sample, so that a
product of B x M x N never reaches memory. Products of 16-bit inputs are exact; float32 ones are computed in float32,
not in TF32: an underestimated norm would pass the bound.

Parts: numbers times their sample's weight as three bfloat16 numbers that add up to it (`exact.py`).
"""

import torch
from torch import Tensor

from lsg.kernels.optional_triton import AVAILABLE, tl, triton

if AVAILABLE:

    @triton.jit
    def _square_sums(  # type: ignore[no-untyped-def]
        rows, columns, kept, partial, SAMPLES, T, M, N, COLUMN_TILES, TILES,
        GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
        MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        tile = tl.program_id(0)
        first = tl.program_id(1).to(tl.int64) * GROUP
        m = (tile // COLUMN_TILES) * BLOCK + tl.arange(0, BLOCK)
        n = (tile % COLUMN_TILES) * BLOCK + tl.arange(0, BLOCK)
        chosen = (m[:, None] < M) & (n[None, :] < N)
        if MASKED:
            chosen = tl.load(kept + m.to(tl.int64)[:, None] * N + n[None, :], mask=chosen, other=0) != 0
        for i in range(0, tl.minimum(GROUP, SAMPLES - first)):
            sample = first + i
            own_rows = rows + sample * T * M
            own_columns = columns + sample * T * N
            product = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            for t_start in range(0, T, BLOCK_T):
                t = t_start + tl.arange(0, BLOCK_T)
                rows_mask = (t[:, None] < T) & (m[None, :] < M)
                columns_mask = (t[:, None] < T) & (n[None, :] < N)
                p = tl.load(own_rows + t.to(tl.int64)[:, None] * M + m[None, :], mask=rows_mask, other=0.0)
                q = tl.load(own_columns + t.to(tl.int64)[:, None] * N + n[None, :], mask=columns_mask, other=0.0)
                product = tl.dot(tl.trans(p), q, product, input_precision=PRECISION)
            squares = product * product
            if MASKED:
                squares = tl.where(chosen, squares, 0.0)
            tl.store(partial + sample * TILES + tile, tl.sum(tl.sum(squares, axis=1), axis=0))

    @triton.jit
    def _weighted_parts(  # type: ignore[no-untyped-def]
        values, weights, parts, T, WIDTH, BLOCK: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        weight = tl.load(weights + token // T)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        own = tl.load(values + token * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        left = tl.where(weight != 0.0, own * weight, 0.0)  # what has weight 0 may hold anything
        for part in tl.static_range(3):
            rounded = left.to(tl.bfloat16)
            tl.store(parts + (token * 3 + part) * WIDTH + columns, rounded, mask=inside)
            left -= rounded.to(tl.float32)


def square_sums(rows_BTM: Tensor, columns_BTN: Tensor, kept_MN: Tensor | None) -> Tensor:
    """Sums of squares of the kept elements of rows^T columns: (B, n) in float32, to be added up over n.

    kept: booleans, None for all.
    """
    rows, columns = rows_BTM.contiguous(), columns_BTN.contiguous()
    batch, tokens, m = rows.shape
    n = columns.shape[2]
    assert columns.shape[:2] == (batch, tokens) and columns.dtype == rows.dtype
    single = rows.dtype == torch.float32  # multiplied by ordinary cores: smaller tiles
    block, group = (64, 8) if single else (128, 16)
    column_tiles = triton.cdiv(n, block)
    tiles = triton.cdiv(m, block) * column_tiles
    partial = torch.empty(batch, tiles, dtype=torch.float32, device=rows.device)
    with torch.cuda.device(rows.device):
        _square_sums[(tiles, triton.cdiv(batch, group))](
            rows, columns, None if kept_MN is None else kept_MN.contiguous().view(torch.uint8), partial,
            batch, tokens, m, n, column_tiles, tiles, GROUP=group,
            BLOCK_T=min(32 if single else 64, max(16, triton.next_power_of_2(tokens))),
            BLOCK=block, MASKED=kept_MN is not None, PRECISION="ieee",
            num_warps=4 if single else 8, num_stages=2,
        )  # fmt: skip
    return partial


def weighted_parts(values_BTN: Tensor, weights_B: Tensor) -> Tensor:
    """(B, T, N) -> (B * T, 3, N) in bfloat16: what adds up to each number times its sample's weight, 0 for weight 0."""
    values = values_BTN.contiguous()
    batch, tokens, width = values.shape
    parts = torch.empty(batch * tokens, 3, width, dtype=torch.bfloat16, device=values.device)
    block = min(1024, triton.next_power_of_2(width))
    with torch.cuda.device(values.device):
        _weighted_parts[(batch * tokens, triton.cdiv(width, block))](
            values, weights_B.float().contiguous(), parts, tokens, width, BLOCK=block, num_warps=4
        )
    return parts
