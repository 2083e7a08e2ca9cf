"""Convolutions with standardised weights; per-sample gradients of weight, gain and bias.

A kernel is used as K = gain u with u = (w - mean w) / |w - mean w|, one for each output channel. Where w moves by d, K
moves by gain/|w - mean w| times  d - mean d - u <u, d>,  and a sample's gradient G of K becomes, for w, the same
combination of G. That of a dense weight is formed so. In factor space G is never formed: the part of d itself goes
through the convolution's rule, and the other two act on the layer's output, by two numbers a channel and sample:
<u, d> along the output itself, mean d along the sum over each patch.
"""

from typing import Any

import torch
from torch import Tensor

from lsg.layers.autograd_functions import fixed_signature, refuse_double_backward
from lsg.layers.conv import CONV, Geometry, convolution
from lsg.layers.linear import compute_dtype
from lsg.layers.operands import Carriers, Space, weight_operands
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rows import Rows
from lsg.layers.rule import Rule
from lsg.layers.samples import SamplePlaces
from lsg.models.standardised_conv import StandardisedConv2d
from lsg.subspace.space import spread


class _Standardised(torch.autograd.Function):
    """The dense carriers of K, from those of the weight (B, out, in, *taps) and of the gain (B, out)."""

    generate_vmap_rule = True

    @staticmethod
    @fixed_signature
    def forward(weight: Tensor, gain: Tensor, direction: Tensor, scale: Tensor, inside: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        direction, scale, inside = ctx.saved_tensors
        # Mean and product with u are one product with two vectors, and taking them away is one, too: on a GPU, reading
        # and writing so many numbers is all that this costs.
        g_OBC, vectors = grads[0].flatten(2).transpose(0, 1), torch.stack([torch.ones_like(direction), direction], 1)
        sums = g_OBC @ vectors.mT
        shares = torch.stack([torch.full_like(scale, 1 / direction.shape[1]), inside.to(scale.dtype)], 1)
        turned = g_OBC * scale.view(-1, 1, 1)
        turned.baddbmm_(sums * (shares * scale.unsqueeze(1)).unsqueeze(1), vectors, alpha=-1)
        return turned.transpose(0, 1).reshape(grads[0].shape), sums[..., 1].mT, None, None, None


class _MovedOutput(torch.autograd.Function):
    """y itself, as if `along` (B, out) times y without bias, and `level` (B, out) times `patch`, were added to it."""

    generate_vmap_rule = True

    @staticmethod
    @fixed_signature
    def forward(y: Tensor, bias: Tensor, patch: Tensor, along: Tensor, level: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        (g,) = grads
        y, bias, patch = ctx.saved_tensors
        wide = torch.promote_types(g.dtype, torch.float32)
        own = y - bias.view(-1, 1, 1)
        sums = ((g * other).sum((2, 3), dtype=wide) for other in (own, patch))
        return g, None, None, *sums


def standardised_conv_forward(
    module: StandardisedConv2d, patched: PatchedModule, places: SamplePlaces, input: Tensor
) -> Tensor:
    dtype = compute_dtype(input)
    images = Rows(patched, places.input(), input, 3)
    x = images.x.to(dtype)
    with torch.no_grad():
        direction, length, inside = module.directions()
        gain = module.gain.detach()
        kernel = (direction * gain.unsqueeze(1)).view_as(module.weight).to(dtype)
    assert module.bias is not None
    bias, geometry = module.bias.detach().to(dtype), Geometry(module.stride, _pair(module.padding), module.dilation)
    own = {name: images.carrier(slot.carriers[0]) for name, slot in patched.slots.items() if name != "weight"}
    carriers, space = weight_operands(patched.slots.get("weight"), dtype, images.carrier)
    gain_carrier = own.get("gain", gain.new_zeros(x.shape[0], len(gain)))
    scale = gain / length
    if carriers.dense is not None:
        dense = _Standardised.apply(carriers.dense, gain_carrier, direction, scale, inside)
        y = convolution(x, kernel, bias, geometry, Carriers(dense=dense), own.get("bias"), space)
        return images.back(y)
    along, level = gain_carrier / gain, torch.zeros_like(gain_carrier)
    if carriers.rows is not None:
        with torch.autocast(x.device.type, enabled=False):
            along = along - _moved(carriers, space, direction) * (inside / length)
            level = -_moved(carriers, space, torch.full_like(direction, 1 / direction.shape[1])) * scale
        kept = scale if space.rows_kept is None else scale[space.rows_kept]
        carriers = Carriers(carriers.rows * kept, carriers.columns)
        space = space._replace(row_factor=space.row_factor * scale.to(dtype).unsqueeze(1))
    y = convolution(x, kernel, bias, geometry, carriers, own.get("bias"), space)
    with torch.no_grad():
        patch = torch.nn.functional.conv2d(x, torch.ones_like(kernel[:1]), None, *geometry)
    return images.back(_MovedOutput.apply(y, bias, patch, along, level))


def _moved(carriers: Carriers, space: Space, vectors: Tensor) -> Tensor:
    """(B, out): how the product of each row of the weight with its vector moves with the carriers of both factors.

    vectors: (out, columns)."""
    row_factor, column_factor = (factor.to(vectors.dtype) for factor in (space.row_factor, space.column_factor))
    by_rows = column_factor @ vectors.mT
    if space.rows_kept is not None:
        by_rows = by_rows[:, space.rows_kept]
    if space.columns_kept is not None:
        vectors = vectors[:, space.columns_kept]
    from_rows = spread((carriers.rows * by_rows).sum(1), space.rows_kept, len(row_factor))
    return from_rows + ((carriers.columns @ vectors.mT) * row_factor.mT).sum(1)


def _pair(padding: Any) -> tuple[int, int]:
    assert not isinstance(padding, str)
    return padding[0], padding[1]


STANDARDISED_CONV = Rule(standardised_conv_forward, CONV.layouts, known=frozenset({"weight", "bias", "gain"}))
