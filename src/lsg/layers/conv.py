"""Convolutions in one, two and three dimensions; per-sample gradients of kernel and bias.

The kernel is seen as M (out x in*taps) with row factor A (out x r) and column factor C (r x in*taps), so that C is
itself a kernel with r output channels. With a = conv(x, C) and h = A^T g a sample's gradients in factor space are
dA^T = a g^T  and  dC = sum over positions of h times the input patch. The latter spreads the r channels of h over
the taps, never the input's channels: one batched product against x itself. On a GPU, with channels last, a kernel
(`conv_kernel.py`) does both without spreading anything.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.kernels import conv_kernel, conv_reference
from lsg.kernels.factor_gradient import select
from lsg.layers.autograd_functions import fixed_signature, refuse_double_backward
from lsg.layers.linear import compute_dtype, weight_as
from lsg.layers.operands import Carriers, Operand, Space, weight_operands
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rows import Rows
from lsg.layers.rule import Rule
from lsg.layers.samples import SamplePlaces
from lsg.parameters.slot import Layout

_CONV = (None, F.conv1d, F.conv2d, F.conv3d)
_AT_ONCE = 2**20  # numbers of per-sample gradients that are computed together on a CPU


class Geometry(NamedTuple):
    """Where a kernel's taps are read. One entry for each dimension of space."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1


class _Operands(NamedTuple):
    """Of y = conv(x, weight) + bias."""

    x: Operand
    weight: Operand = None
    bias: Operand = None
    geometry: Operand = None
    row_carrier: Operand = None
    column_carrier: Operand = None
    dense_carrier: Operand = None
    bias_carrier: Operand = None
    row_factor: Operand = None
    column_factor: Operand = None
    rows_kept: Operand = None
    rows_place: Operand = None
    columns_kept: Operand = None
    columns_place: Operand = None


class _Conv(torch.autograd.Function):
    """y = conv(x, weight) + bias for x (B, in, *space), with carriers in place of the kernel's own gradient."""

    generate_vmap_rule = True

    @staticmethod
    @fixed_signature
    def forward(*operands: Any) -> Tensor:
        of = _Operands(*operands)
        return _convolve(of.x, of.weight, of.bias, of.geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        of = _Operands(*inputs)
        space = of.row_factor, of.column_factor, of.rows_kept, of.rows_place, of.columns_kept, of.columns_place
        ctx.save_for_backward(of.x, of.weight, *space)
        ctx.geometry = of.geometry

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        (g,) = grads
        x, weight, *saved = ctx.saved_tensors
        space, needs = Space(*saved), _Operands(*ctx.needs_input_grad)
        d_x = d_rows = d_columns = None
        if needs.x:
            d_x = _convolution_backward(g, x, weight, ctx.geometry, (True, False))[0]
        if needs.row_carrier:
            d_rows, d_columns = _factor_gradients(x, g, space, weight.shape[1:], ctx.geometry)
        gradients = _Operands(
            x=d_x,
            row_carrier=d_rows,
            column_carrier=d_columns,
            dense_carrier=_dense_gradient(x, g, weight, ctx.geometry) if needs.dense_carrier else None,
            bias_carrier=g.flatten(2).sum(-1) if needs.bias_carrier else None,
        )
        return tuple(gradients)


def _convolve(x: Tensor, kernel: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    conv = _CONV[x.dim() - 2]
    assert conv is not None
    return conv(x, kernel, bias, *geometry)


def _convolution_backward(
    g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    stride, padding, dilation, groups = geometry
    no_output_padding = [0] * len(stride)
    d_x, d_weight, _ = torch.ops.aten.convolution_backward(
        g, x, weight, None, stride, padding, dilation, False, no_output_padding, groups, [*wanted, False]
    )
    return d_x, d_weight


def _factor_gradients(
    x: Tensor, g: Tensor, space: Space, kernel_shape: Sequence[int], geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """-> (B, r, kept rows) and (B, r, kept columns). kernel_shape: (in, *taps)."""
    stride, padding, dilation, _ = geometry
    a = _convolve(x, space.column_factor.view(-1, *kernel_shape), None, Geometry(stride, padding, dilation))
    taps = kernel_shape[1:]
    if conv_kernel.is_faster(x, g, 1):
        g_last = g.contiguous(memory_format=torch.channels_last)
        h = (g_last.movedim(1, -1) @ space.row_factor).movedim(-1, 1)
        d_rows = conv_kernel.patch_products(a, g_last, (1, 1), (1, 1), (0, 0), (1, 1), *space.rows)
        return d_rows, conv_kernel.patch_products(h, x, taps, stride, padding, dilation, *space.columns)
    g_BOP = g.flatten(2)
    h = torch.unflatten(space.row_factor.mT @ g_BOP, -1, g.shape[2:])
    d_rows = select(a.flatten(2) @ g_BOP.mT, space.rows_kept)
    return d_rows, conv_reference.patch_products(h, x, taps, stride, padding, dilation, space.columns_kept)


def _dense_gradient(x: Tensor, g: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """A sample's gradient of the whole kernel: (B, *kernel shape)."""
    stride, padding, dilation, groups = geometry
    if conv_kernel.is_faster(x, g, groups):
        products = conv_kernel.patch_products(g, x, weight.shape[2:], stride, padding, dilation)
    elif _patches_pay(g, groups):
        products = conv_reference.patch_products(g, x, weight.shape[2:], stride, padding, dilation)
    else:
        return _per_sample_kernel_gradient(g, x, weight, geometry)
    return torch.unflatten(products, 2, weight.shape[1:])


def _patches_pay(g: Tensor, groups: int) -> bool:
    """Whether a dense kernel's gradients are products of patches: on a GPU, where a convolution with a group for each
    sample starts kernels for each of them."""
    return g.is_cuda and groups == 1


def _per_sample_kernel_gradient(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """(B, *kernel shape). On a CPU some samples at a time: their gradients stay in its cache, and with 2**26 numbers at
    once PyTorch's convolutions take another way, which is slower by far."""
    some = max(1, _AT_ONCE // weight.numel()) if x.device.type == "cpu" else len(x)
    parts = [_grouped_gradient(*part, weight, geometry) for part in zip(g.split(some), x.split(some), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _grouped_gradient(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Samples as groups of one big convolution: (B, *kernel shape)."""
    stride, padding, dilation, groups = geometry
    batch = x.shape[0]
    shape_only = weight.new_empty(batch * weight.shape[0], *weight.shape[1:])
    wide = Geometry(stride, padding, dilation, groups * batch)
    grouped = _convolution_backward(_as_one_sample(g), _as_one_sample(x), shape_only, wide, (False, True))
    return torch.unflatten(grouped[1], 0, (batch, -1))


def _as_one_sample(values: Tensor) -> Tensor:
    """(B, channels, *space) -> (1, B*channels, *space), with strides as from new: where a dimension has size 1 a
    transposed tensor passes for a contiguous one, and torch's kernels then disagree on the layout."""
    return values.contiguous().flatten().reshape(1, -1, *values.shape[2:])


def convolution(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    carriers: Carriers,
    bias_carrier: Tensor | None,
    space: Space,
) -> Tensor:
    """conv(x, kernel) + bias, whose gradients for kernel and bias go into carriers."""
    y: Tensor = _Conv.apply(*_Operands(x, kernel, bias, geometry, *carriers, bias_carrier, *space))
    return y


def conv_forward(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, patched: PatchedModule, places: SamplePlaces, input: Tensor
) -> Tensor:
    dtype = compute_dtype(input)
    images = Rows(patched, places.input(), input, module.weight.dim() - 1)
    x = images.x.to(dtype)
    padding: Any = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * len(module.stride)
    slot = patched.slots.get("weight")
    carriers, space = weight_operands(slot, dtype, images.carrier)
    bias_slot = patched.slots.get("bias")
    y = convolution(
        x,
        weight_as(module.weight, slot, dtype),
        None if module.bias is None else module.bias.detach().to(dtype),
        Geometry(module.stride, padding, module.dilation, module.groups),
        carriers,
        images.carrier(bias_slot.carriers[0]) if bias_slot else None,
        space,
    )
    return images.back(y)


def _layouts(module: nn.Conv2d) -> Mapping[str, Layout]:
    # The paper puts L on the output channels here (errata). Grouped kernels are small: they stay dense.
    if module.groups > 1:
        return {}
    return {"weight": Layout(transposed=False, taps=module.weight.shape[2:].numel())}


CONV = Rule(conv_forward, _layouts)
