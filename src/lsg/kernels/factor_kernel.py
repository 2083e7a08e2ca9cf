"""Triton kernel for `factor_gradients`; importable without Triton, where AVAILABLE is False.

Two programs handle a sample, one for each factor. A program runs over its first operand p once to form a = p F^T
(T x r, kept on chip), then over its second operand q once to form a^T q, and stores the kept columns only. The two
programs of a sample read the same two operands in opposite order at about the same time, so memory is read about once.
Sums are float32; products run in the inputs' precision. Float32 ones are tf32 products where PyTorch is allowed those
(`torch.set_float32_matmul_precision`), and three of them, which is as exact, where it is not.
"""

from typing import Any

import torch
from torch import Tensor

from lsg.kernels.optional_triton import AVAILABLE, tl, triton

if AVAILABLE:
    from torch.library import triton_op, wrap_triton

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        x, g, column_factor, row_factor, rows_place, columns_place, rows_out, columns_out,
        T, IN, OUT, ROWS, COLUMNS, column_factor_rank, column_factor_entry, row_factor_rank, row_factor_entry,
        RANK: tl.constexpr, PADDED_RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
        ROWS_MASKED: tl.constexpr, COLUMNS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        sample = (tl.program_id(0) // 2).to(tl.int64)
        if tl.program_id(0) % 2 == 0:
            _one_factor(
                x + sample * T * IN, column_factor, g + sample * T * OUT, rows_place, rows_out + sample * RANK * ROWS,
                T, IN, OUT, ROWS, column_factor_rank, column_factor_entry,
                RANK, PADDED_RANK, BLOCK_T, BLOCK, ROWS_MASKED, PRECISION,
            )  # fmt: skip
        else:
            _one_factor(
                g + sample * T * OUT, row_factor, x + sample * T * IN, columns_place,
                columns_out + sample * RANK * COLUMNS,
                T, OUT, IN, COLUMNS, row_factor_rank, row_factor_entry,
                RANK, PADDED_RANK, BLOCK_T, BLOCK, COLUMNS_MASKED, PRECISION,
            )  # fmt: skip

    @triton.jit
    def _one_factor(  # type: ignore[no-untyped-def]
        p, factor, q, place, out, T, P, Q, WIDTH, factor_rank, factor_entry,
        RANK: tl.constexpr, PADDED_RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
        MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """out (r, WIDTH) = (p F^T)^T q on the entries of q that have a place."""
        ranks = tl.arange(0, PADDED_RANK)
        for t_start in range(0, T, BLOCK_T):
            tokens = t_start + tl.arange(0, BLOCK_T)
            a = tl.zeros((BLOCK_T, PADDED_RANK), dtype=tl.float32)
            for start in range(0, P, BLOCK):
                entries = start + tl.arange(0, BLOCK)
                tile_mask = (tokens[:, None] < T) & (entries[None, :] < P)
                p_tile = tl.load(p + tokens[:, None] * P + entries[None, :], mask=tile_mask, other=0.0)
                factor_mask = (ranks[None, :] < RANK) & (entries[:, None] < P)
                offsets = ranks[None, :] * factor_rank + entries[:, None] * factor_entry
                factor_tile = tl.load(factor + offsets, mask=factor_mask, other=0.0)
                a = tl.dot(p_tile, factor_tile, a, input_precision=PRECISION)
            a_rT = tl.trans(a).to(q.dtype.element_ty)
            for start in range(0, Q, BLOCK):
                entries = start + tl.arange(0, BLOCK)
                tile_mask = (tokens[:, None] < T) & (entries[None, :] < Q)
                q_tile = tl.load(q + tokens[:, None] * Q + entries[None, :], mask=tile_mask, other=0.0)
                products = tl.dot(a_rT, q_tile, input_precision=PRECISION)
                target = entries
                if MASKED:
                    target = tl.load(place + entries, mask=entries < Q, other=-1)
                store_mask = (ranks[:, None] < RANK) & (entries[None, :] < Q) & (target[None, :] >= 0)
                where = out + ranks[:, None] * WIDTH + target[None, :]
                if t_start > 0:  # longer samples come in several token blocks; this program alone owns the sum
                    products += tl.load(where, mask=store_mask, other=0.0)
                tl.store(where, products, mask=store_mask)

    def _tiling(tokens: int, single: bool) -> tuple[int, int, int]:
        """Columns of a tile, warps and stages that are fastest for samples of so many tokens."""
        if single or tokens <= 8 or tokens > 32:
            return 64 if single else 128, 4, 3
        return 256, 4, 3 if tokens <= 16 else 2

    def _launch(
        kernel: Any,
        x: Tensor,
        g: Tensor,
        row_factor: Tensor,
        column_factor: Tensor,
        rows_place: Tensor | None,
        columns_place: Tensor | None,
        rows: int,
        columns: int,
    ) -> tuple[Tensor, Tensor]:
        batch, tokens, inputs = x.shape
        block, warps, stages = _tiling(tokens, x.dtype == torch.float32)
        outputs, rank = row_factor.shape
        rows_out = torch.empty(batch, rank, rows, dtype=torch.float32, device=x.device)
        columns_out = torch.empty(batch, rank, columns, dtype=torch.float32, device=x.device)
        kernel[(2 * batch,)](
            x, g, column_factor, row_factor, rows_place, columns_place, rows_out, columns_out,
            tokens, inputs, outputs, rows, columns,
            column_factor.stride(0), column_factor.stride(1), row_factor.stride(1), row_factor.stride(0),
            RANK=rank, PADDED_RANK=max(16, triton.next_power_of_2(rank)),
            BLOCK_T=min(128, max(16, triton.next_power_of_2(tokens))),
            BLOCK=block,
            ROWS_MASKED=rows_place is not None, COLUMNS_MASKED=columns_place is not None,
            PRECISION=float32_products(),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return rows_out, columns_out

    @triton_op("lsg::factor_gradients", mutates_args={})
    def _traceable(
        x: Tensor,
        g: Tensor,
        row_factor: Tensor,
        column_factor: Tensor,
        rows_place: Tensor | None,
        columns_place: Tensor | None,
        rows: int,
        columns: int,
    ) -> tuple[Tensor, Tensor]:
        return _launch(wrap_triton(_kernel), x, g, row_factor, column_factor, rows_place, columns_place, rows, columns)


def float32_products() -> str:
    """How Triton should multiply float32 numbers: as PyTorch may."""
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # newer versions refuse to tell where a library has a setting of its own
        exact = torch.backends.cuda.matmul.fp32_precision == "ieee"
    return "tf32x3" if exact else "tf32"


def factor_gradients(
    x: Tensor,
    g: Tensor,
    row_factor: Tensor,
    column_factor: Tensor,
    rows_place: Tensor | None,
    columns_place: Tensor | None,
    rows: int,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """x (B, T, I), g (B, T, O), A (O, r), C (r, I), places (O) and (I) or None -> (B, r, rows), (B, r, columns)."""
    arguments = (x, g, row_factor, column_factor, rows_place, columns_place, rows, columns)
    # The operator is what the compiler can see through; launching the kernel itself costs less otherwise.
    return _traceable(*arguments) if torch.compiler.is_compiling() else _launch(_kernel, *arguments)
