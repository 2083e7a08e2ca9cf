"""Linear layers: `nn.Linear` and transformers' `Conv1D`; per-sample gradients of weight and bias.

For y = x M^T with M (out x in), row factor A (out x r), column factor C (r x in) and g = dloss/dy, a sample's
gradients in factor space are  dA^T = (x C^T)^T g  and  dC = (g A)^T x.  The out x in gradient is never formed.
That of a dense weight is g^T x: either formed for its carrier, or left as the pair of x and g (`factored_calls.py`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.kernels.factor_gradient import factor_gradients
from lsg.kernels.optional_triton import untransformed
from lsg.layers.autograd_functions import fixed_signature, refuse_double_backward
from lsg.layers.operands import Operand, Space, weight_operands
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rule import INPUTS_FIRST, OUTPUTS_FIRST, Rule
from lsg.layers.samples import Axis, SamplePlaces
from lsg.parameters.cast_cache import can_share
from lsg.parameters.slot import Slot


class _Operands(NamedTuple):
    """Of y = x weight^T + bias. x_cast: the values of x in the precision of the product, None where x has it."""

    x: Operand
    x_cast: Operand = None
    weight: Operand = None
    bias: Operand = None
    row_carrier: Operand = None
    column_carrier: Operand = None
    dense_carrier: Operand = None
    bias_carrier: Operand = None
    output_carrier: Operand = None
    call: Operand = None  # no tensor: where the backward leaves x, for the output's carrier
    row_factor: Operand = None
    column_factor: Operand = None
    rows_kept: Operand = None
    rows_place: Operand = None
    columns_kept: Operand = None
    columns_place: Operand = None


class _Linear(torch.autograd.Function):
    """y = x weight^T + bias for x (B, ..., in), with carriers in place of the weight's own gradient."""

    generate_vmap_rule = True

    @staticmethod
    @fixed_signature
    def forward(*operands: Any) -> Tensor:
        of = _Operands(*operands)
        y = F.linear(of.x if of.x_cast is None else of.x_cast, of.weight, of.bias)
        # Of three dimensions it may be a view, which nobody could write to: not what a layer returns.
        return torch.ops.aten._unsafe_view(y, y.shape) if untransformed() and y._is_view() else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        of = _Operands(*inputs)
        space = of.row_factor, of.column_factor, of.rows_kept, of.rows_place, of.columns_kept, of.columns_place
        ctx.save_for_backward(of.x if of.x_cast is None else of.x_cast, of.weight, *space)
        ctx.x_dtype = of.x.dtype
        ctx.call = of.call  # no saved tensor: a checkpoint would put the carrier of its second forward in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        (g,) = grads
        x, weight, *saved = ctx.saved_tensors
        space, needs = Space(*saved), _Operands(*ctx.needs_input_grad)
        d_x = (g @ weight).to(ctx.x_dtype) if needs.x else None
        x_BTI, g_BTO = x.reshape(x.shape[0], -1, x.shape[-1]), g.reshape(g.shape[0], -1, g.shape[-1])
        d_rows = d_columns = None
        if needs.row_carrier:
            d_rows, d_columns = factor_gradients(
                x_BTI, g_BTO, space.row_factor, space.column_factor, space.rows, space.columns
            )
        if ctx.call is not None:
            ctx.call.keep(x_BTI)
        gradients = _Operands(
            x=d_x,
            row_carrier=d_rows,
            column_carrier=d_columns,
            dense_carrier=g_BTO.mT @ x_BTI if needs.dense_carrier else None,
            bias_carrier=g_BTO.sum(1) if needs.bias_carrier else None,
            output_carrier=g if needs.output_carrier else None,
        )
        return tuple(gradients)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products on x run in: autocast's where it is on."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def weight_as(weight: Tensor, slot: Slot | None, dtype: torch.dtype) -> Tensor:
    """A weight (or its slot's part of it) in that precision, cut off from autograd."""
    return weight.detach().to(dtype) if slot is None else slot.value_as(dtype)


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
        of_weight = weight_operands(slot if call is None else None, dtype)
        if stored_inputs_first:
            matrix, of_weight = matrix.mT, of_weight.mT
        whole = len(weight_slots) == 1 and bias is not None
        operands = _Operands(
            x_B,
            x_cast,
            matrix,
            bias.detach().to(dtype) if whole and bias is not None else None,
            *of_weight.carriers,
            bias_slot.carriers[0] if whole and bias_slot is not None else None,
            None if call is None else call.carrier,
            call,
            *of_weight.space,
        )
        parts.append(_Linear.apply(*operands))
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


def _linear_fused(module: nn.Linear) -> Mapping[str, int]:
    return {"weight": 0} if module.out_features == 3 * module.in_features else {}


def _conv1d_fused(module: Any) -> Mapping[str, int]:
    inputs, outputs = module.weight.shape
    return {"weight": 1} if outputs == 3 * inputs else {}


def is_conv1d(module: nn.Module) -> bool:
    """Named, not imported: transformers is an extra."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


LINEAR = Rule(linear_forward, lambda module: {"weight": OUTPUTS_FIRST}, fused=_linear_fused)
CONV1D = Rule(conv1d_forward, lambda module: {"weight": INPUTS_FIRST}, fused=_conv1d_fused)
