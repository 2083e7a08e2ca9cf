"""LayerNorm with affine parameters; per-sample gradients of scale and shift.

y = normalised(x) * scale + shift, so a sample's gradients are sums of g * normalised(x) and of g over the positions
that share a parameter. PyTorch's RMS norm goes through the vmap fallback, which does just that for it.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lsg.kernels import norm_kernel, norm_reference
from lsg.layers.autograd_functions import fixed_signature, refuse_double_backward
from lsg.layers.norm_input import carrier_of, norm_input
from lsg.layers.operands import Operand
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rule import Rule
from lsg.layers.samples import SamplePlaces


class _Operands(NamedTuple):
    """Of a layer norm over `shape`."""

    x: Operand
    shape: Operand = None
    weight: Operand = None
    bias: Operand = None
    eps: Operand = None
    weight_carrier: Operand = None
    bias_carrier: Operand = None


class _LayerNorm(torch.autograd.Function):
    """Layer norm of x (B, ..., *shape) over `shape`, with carriers (B, *shape) for scale and shift."""

    generate_vmap_rule = True

    @staticmethod
    @fixed_signature
    def forward(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        of = _Operands(*operands)
        return torch.native_layer_norm(of.x, of.shape, of.weight, of.bias, of.eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        of = _Operands(*inputs)
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(of.x, of.weight, of.bias, mean, rstd)
        ctx.shape = of.shape

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        g = grads[0].contiguous()
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs = _Operands(*ctx.needs_input_grad)
        d_x = d_weight = d_bias = None
        if needs.x:
            only_x = [True, False, False]
            d_x = torch.ops.aten.native_layer_norm_backward(g, x, ctx.shape, mean, rstd, weight, bias, only_x)[0]
        if needs.weight_carrier and needs.bias_carrier and norm_kernel.is_faster(x):
            d_weight, d_bias = _by_kernel(x, g, mean, rstd, ctx.shape)
        else:
            if needs.weight_carrier:
                d_weight = norm_reference.scale_gradient(x, g, mean, rstd, ctx.shape)
            if needs.bias_carrier:
                d_bias = norm_reference.shift_gradient(g, ctx.shape)
        return tuple(_Operands(x=d_x, weight_carrier=d_weight, bias_carrier=d_bias))


def _by_kernel(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    batch, width = x.shape[0], math.prod(shape)
    flat = (t.reshape(batch, -1, width) for t in (x, g))
    found = norm_kernel.scale_and_shift_gradients(*flat, *(t.reshape(batch, -1).float() for t in (mean, rstd)))
    return found[0].view(batch, *shape), found[1].view(batch, *shape)


def _detached(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.detach().to(dtype)


def layer_norm_forward(module: nn.LayerNorm, patched: PatchedModule, places: SamplePlaces, input: Tensor) -> Tensor:
    axis = places.input()
    x = norm_input(patched.split(input, axis))
    operands = _Operands(
        x,
        tuple(module.normalized_shape),
        _detached(module.weight, x.dtype),
        _detached(module.bias, x.dtype),
        module.eps,
        carrier_of(patched, "weight"),
        carrier_of(patched, "bias"),
    )
    y: Tensor = _LayerNorm.apply(*operands)[0]
    return axis.join(y, input, patched.size)


LAYER_NORM = Rule(layer_norm_forward)
