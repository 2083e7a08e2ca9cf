"""Embedding tables; per-sample gradients.

For y = M[token], dA^T scatters C g into the tokens' columns and dC = A[token]^T g.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.kernels.factor_gradient import select
from lsg.layers.autograd_functions import fixed_signature, refuse_double_backward
from lsg.layers.operands import Operand, weight_operands
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rule import INPUTS_FIRST, Rule
from lsg.layers.samples import Axis, SamplePlaces


class _Operands(NamedTuple):
    """Of y = weight[token]."""

    token: Operand
    weight: Operand = None
    padding_idx: Operand = None  # a number or None
    row_carrier: Operand = None
    column_carrier: Operand = None
    dense_carrier: Operand = None
    row_factor: Operand = None
    column_factor: Operand = None
    rows_kept: Operand = None
    rows_place: Operand = None
    columns_kept: Operand = None
    columns_place: Operand = None


class _Embedding(torch.autograd.Function):
    """y = weight[token] for token (B, ...), with carriers in place of the table's own gradient."""

    generate_vmap_rule = True

    @staticmethod
    @fixed_signature
    def forward(*operands: Any) -> Tensor:
        of = _Operands(*operands)
        return F.embedding(of.token, of.weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        of = _Operands(*inputs)
        ctx.save_for_backward(of.token, of.row_factor, of.column_factor, of.rows_place, of.columns_kept)
        ctx.rows_kept = None if of.row_carrier is None else of.row_carrier.shape[-1]
        ctx.padding_idx, ctx.table_rows = of.padding_idx, of.weight.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        (g,) = grads
        token, row_factor, column_factor, rows_place, columns_kept = ctx.saved_tensors
        needs = _Operands(*ctx.needs_input_grad)
        token_BT = token.reshape(token.shape[0], -1)
        g_BTD = g.reshape(*token_BT.shape, -1)
        if ctx.padding_idx is not None:
            g_BTD = g_BTD * (token_BT != ctx.padding_idx).unsqueeze(-1)
        d_rows = d_columns = d_dense = None
        if needs.row_carrier:
            d_rows = _scatter_rows(token_BT, column_factor @ g_BTD.mT, rows_place, ctx.rows_kept)
            d_columns = select(row_factor[token_BT].mT @ g_BTD, columns_kept)
        if needs.dense_carrier:
            d_dense = _scatter_rows(token_BT, g_BTD.mT, None, ctx.table_rows).mT
        return tuple(_Operands(None, row_carrier=d_rows, column_carrier=d_columns, dense_carrier=d_dense))


def _scatter_rows(token_BT: Tensor, values_BrT: Tensor, place: Tensor | None, width: int) -> Tensor:
    """Sum values into their token's place: (B, r, width). Tokens of masked rows land in a last place, cut off."""
    index = token_BT if place is None else place.long().where(place >= 0, width)[token_BT]
    empty = values_BrT.new_zeros(*values_BrT.shape[:2], width + (place is not None))
    return empty.scatter_add(2, index.unsqueeze(1).expand_as(values_BrT), values_BrT)[..., :width]


def embedding(patched: PatchedModule, axis: Axis, token: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """`F.embedding` with per-sample gradients, for samples along `axis` of the indices."""
    slot = patched.slots["weight"]
    value = weight.detach()
    if padding_idx is not None and padding_idx < 0:
        padding_idx += value.shape[0]
    token_B = patched.split(token, axis)
    carriers, space = weight_operands(slot, value.dtype)
    y: Tensor = _Embedding.apply(*_Operands(token_B, value, padding_idx, *carriers, *space))
    return axis.join(y, token, patched.size)


def embedding_forward(module: nn.Embedding, patched: PatchedModule, places: SamplePlaces, input: Tensor) -> Tensor:
    return embedding(patched, places.input(), input, module.weight, module.padding_idx)


EMBEDDING = Rule(embedding_forward, lambda module: {"weight": INPUTS_FIRST})
