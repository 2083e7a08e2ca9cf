"""Linear layers: `nn.Linear` and transformers' `Conv1D`; per-sample gradients of weight and bias.

For y = x M^T with M (out x in), row factor A (out x r), column factor C (r x in) and g = dloss/dy, a sample's
gradients in factor space are  dA^T = (x C^T)^T g  and  dC = (g A)^T x.  The out x in gradient is never formed.
That of a dense weight is g^T x: either formed for its carrier, or left as the pair of x and g (`calls.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.kernels.factor_gradient import factor_gradients
from lsg.kernels.optional_triton import untransformed
from lsg.layers.autograd_functions import fixed_signature, refuse_double_backward
from lsg.layers.patched_module import PatchedModule
from lsg.layers.samples import Axis, SamplePlaces
from lsg.parameters.cast_cache import can_share
from lsg.parameters.factored_calls import Call
from lsg.parameters.slot import Slot
from lsg.subspace.space import Kept


class _Linear(torch.autograd.Function):
    """y = x weight^T + bias for x (B, ..., in), with carriers in place of the weight's own gradient.

    x_cast: the values of x in the precision of the product, None where x has it.
    """

    generate_vmap_rule = True

    @staticmethod
    @fixed_signature
    def forward(
        x: Tensor,
        x_cast: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        row_factor: Tensor | None,
        column_factor: Tensor | None,
        rows_kept: Tensor | None,
        rows_place: Tensor | None,
        columns_kept: Tensor | None,
        columns_place: Tensor | None,
        row_carrier: Tensor | None,
        column_carrier: Tensor | None,
        dense_carrier: Tensor | None,
        bias_carrier: Tensor | None,
        output_carrier: Tensor | None,
        call: Call | None,
    ) -> Tensor:
        y = F.linear(x if x_cast is None else x_cast, weight, bias)
        # Of three dimensions it may be a view, which nobody could write to: not what a layer returns.
        return torch.ops.aten._unsafe_view(y, y.shape) if untransformed() and y._is_view() else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, x_cast, weight, _, *spaces = inputs[:10]
        ctx.save_for_backward(x if x_cast is None else x_cast, weight, *spaces)
        ctx.x_dtype = x.dtype
        ctx.call = inputs[15]  # no saved tensor: a checkpoint would put the carrier of its second forward in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        (g,) = grads
        x, weight, row_factor, column_factor, rows_kept, rows_place, columns_kept, columns_place = ctx.saved_tensors
        needs = ctx.needs_input_grad
        d_x = (g @ weight).to(ctx.x_dtype) if needs[0] else None
        x_BTI, g_BTO = x.reshape(x.shape[0], -1, x.shape[-1]), g.reshape(g.shape[0], -1, g.shape[-1])
        d_rows = d_columns = d_dense = d_bias = None
        if needs[10]:
            rows, columns = (rows_kept, rows_place), (columns_kept, columns_place)
            d_rows, d_columns = factor_gradients(x_BTI, g_BTO, row_factor, column_factor, rows, columns)
        if needs[12]:
            d_dense = g_BTO.mT @ x_BTI
        if needs[13]:
            d_bias = g_BTO.sum(1)
        if ctx.call is not None:
            ctx.call.keep(x_BTI)
        return (d_x, *(None,) * 9, d_rows, d_columns, d_dense, d_bias, g if needs[14] else None, None)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products on x run in: autocast's where it is on."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def weight_as(weight: Tensor, slot: Slot | None, dtype: torch.dtype) -> Tensor:
    """A weight (or its slot's part of it) in that precision, cut off from autograd."""
    return weight.detach().to(dtype) if slot is None else slot.value_as(dtype)


def weight_operands(
    slot: Slot | None, dtype: torch.dtype, carrier_of: Callable[[Tensor], Tensor] = lambda carrier: carrier
) -> tuple[Tensor | None, ...]:
    """A weight's slot -> row and column factor; kept rows, their places; kept columns, their places; and carriers of
    rows, columns and the dense weight, each as `carrier_of` makes it."""
    if slot is None:
        return (None,) * 9
    space, carriers = slot.subspace, map(carrier_of, slot.carriers)
    if space is None:
        return (*(None,) * 8, *carriers)
    kept = (*_indices(space.rows_kept), *_indices(space.columns_kept))
    return (*slot.factors_as(dtype), *kept, *carriers, None)


def _indices(kept: Kept | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if kept is None else (kept.indices, kept.place)


def transpose_operands(operands: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The same for the transposed matrix: rows become columns."""
    row_factor, column_factor, rows_kept, rows_place, columns_kept, columns_place, rows, columns, dense = operands
    flipped = (None if f is None else f.mT for f in (column_factor, row_factor))
    flat_dense = None if dense is None else dense.mT
    return (*flipped, columns_kept, columns_place, rows_kept, rows_place, columns, rows, flat_dense)


def linear(
    patched: PatchedModule,
    axis: Axis,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_slots: list[Slot | None],
    bias_slot: Slot | None,
    *,
    stored_inputs_first: bool = False,
) -> Tensor:
    """`F.linear` with per-sample gradients, for samples along `axis` of x; `weight_slots` has three entries for a split
    query-key-value weight."""
    dtype = compute_dtype(x)
    x_B, x_cast = patched.split(x, axis), None
    if x_B.dtype != dtype and can_share(x_B):
        x_cast = patched.batch.last_cast(x_B, dtype)
    else:
        x_B = x_B.to(dtype)
    used = x_B if x_cast is None else x_cast
    parts = []
    for slot in weight_slots:
        matrix = weight_as(weight, slot, dtype)
        call = None if slot is None else slot.call(used, stored_inputs_first=stored_inputs_first)
        operands = weight_operands(slot if call is None else None, dtype)
        if stored_inputs_first:
            matrix, operands = matrix.mT, transpose_operands(operands)
        whole = len(weight_slots) == 1 and bias is not None
        plain_bias = bias.detach().to(dtype) if whole and bias is not None else None
        bias_carrier = bias_slot.carriers[0] if whole and bias_slot is not None else None
        output_carrier = None if call is None else call.carrier
        parts.append(_Linear.apply(x_B, x_cast, matrix, plain_bias, *operands, bias_carrier, output_carrier, call))
    y: Tensor = parts[0]
    if len(parts) > 1:
        y = torch.cat(parts, dim=-1)
        if bias is not None:
            y = y + per_sample(bias.detach(), bias_slot, y.dim()).to(dtype)
    return axis.join(y, x, patched.size)


def per_sample(value: Tensor, slot: Slot | None, dimensions: int) -> Tensor:
    """A vector as (B, 1, ..., features), so that adding or multiplying it gives each sample a gradient of its own."""
    if slot is None:
        return value
    wide: Tensor = value + slot.carriers[0]
    return wide.reshape(wide.shape[0], *(1,) * (dimensions - 2), wide.shape[-1])


def weight_slots(patched: PatchedModule, name: str = "weight") -> list[Slot | None]:
    """The slot of a weight, or the three slots of a split one."""
    split = [patched.slots[key] for key in (f"{name}[{i}]" for i in range(3)) if key in patched.slots]
    return list(split) or [patched.slots.get(name)]


def linear_forward(module: nn.Linear, patched: PatchedModule, places: SamplePlaces, input: Tensor) -> Tensor:
    return linear(
        patched, places.input(), input, module.weight, module.bias, weight_slots(patched), patched.slots.get("bias")
    )


def conv1d_forward(module: Any, patched: PatchedModule, places: SamplePlaces, x: Tensor) -> Tensor:
    """transformers' Conv1D: a linear layer whose weight is stored in x out."""
    slots = weight_slots(patched)
    bias_slot = patched.slots.get("bias")
    return linear(patched, places.input(), x, module.weight, module.bias, slots, bias_slot, stored_inputs_first=True)
