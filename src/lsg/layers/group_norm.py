"""GroupNorm and InstanceNorm with affine parameters; per-sample gradients of scale and shift.

y = normalised(x) * scale + shift, so a sample's gradients are sums of g * normalised(x) and of g over the positions
of a channel. On a GPU, with channels last, kernels (`group_norm_kernel.py`) do it all.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.kernels import group_norm_kernel
from lsg.layers.autograd_functions import fixed_signature, refuse_double_backward
from lsg.layers.norm_input import carrier_of, norm_dtype, norm_input
from lsg.layers.operands import Operand
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rows import Rows
from lsg.layers.rule import Rule
from lsg.layers.samples import SamplePlaces


def group_norm_forward(module: nn.GroupNorm, patched: PatchedModule, places: SamplePlaces, input: Tensor) -> Tensor:
    return _group_norm(module, patched, Rows(patched, places.input(), input, input.dim() - 1), module.num_groups)


def instance_norm_forward(
    module: nn.InstanceNorm2d, patched: PatchedModule, places: SamplePlaces, input: Tensor
) -> Tensor:
    module._check_input_dim(input)
    images = Rows(patched, places.input(), input, module._get_no_batch_dim())
    # A group norm of one channel a group. torch's own instance norm, on a CPU, has wrong gradients for a batch of one
    # sample whose incoming gradient is laid out channels last.
    return _group_norm(module, patched, images, images.x.shape[1])


def frozen_group_norm_forward(module: nn.GroupNorm, patched: PatchedModule, input: Tensor) -> Any:
    """Of a module that trains nothing: for the kernel's sake alone."""
    trained = any(value is not None and value.requires_grad for value in (module.weight, module.bias))  # by others
    if not trained and _kernel_is_faster(module, patched, input, module.num_groups):
        return _by_group_norm_kernel(module, patched, input, module.num_groups, (None, None))
    return patched.own_forward(input)


def _group_norm(module: Any, patched: PatchedModule, images: Rows, groups: int) -> Tensor:
    x = images.x
    own = (carrier_of(patched, name) for name in ("weight", "bias"))
    carriers = tuple(None if each is None else images.carrier(each) for each in own)
    if _kernel_is_faster(module, patched, x, groups):
        return images.back(_by_group_norm_kernel(module, patched, x, groups, carriers))
    normalised = F.group_norm(norm_input(x), groups, None, None, module.eps)
    return images.back(_channel_affine(module, normalised, carriers))


def _kernel_is_faster(module: Any, patched: PatchedModule, x: Tensor, groups: int) -> bool:
    """False also where PyTorch refuses: for it to say so."""
    values = [value for value in (module.weight, module.bias) if value is not None]
    fit = all(v.shape == x.shape[1:2] and v.dtype in (x.dtype, torch.float32) for v in values)
    return (
        bool(patched.batch.channels_last_norms)
        and fit
        and x.numel() > groups
        and group_norm_kernel.is_faster(x, groups)
    )


def _by_group_norm_kernel(
    module: Any, patched: PatchedModule, x: Tensor, groups: int, carriers: tuple[Tensor | None, ...]
) -> Tensor:
    patched.batch.note_channels_last()
    weight, bias = (None if value is None else value.detach().contiguous() for value in (module.weight, module.bias))
    operands = _Operands(x, groups, weight, bias, module.eps, norm_dtype(x), carriers[0], carriers[1])
    y: Tensor = _GroupNorm.apply(*operands)[0]
    return y


class _Operands(NamedTuple):
    """Of a group norm, whose result is of `dtype`."""

    x: Operand
    groups: Operand = None
    weight: Operand = None
    bias: Operand = None
    eps: Operand = None
    dtype: Operand = None
    weight_carrier: Operand = None
    bias_carrier: Operand = None


class _GroupNorm(torch.autograd.Function):
    """Group norm of x (B, channels, height, width) by kernels, with carriers (B, channels) for scale and shift."""

    @staticmethod
    @fixed_signature
    def forward(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        of = _Operands(*operands)
        return group_norm_kernel.normalise(of.x, of.groups, of.weight, of.bias, of.eps, of.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        of = _Operands(*inputs)
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(of.x, of.weight, mean, rstd)
        ctx.groups, ctx.eps = of.groups, of.eps

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, needs = grads[0], _Operands(*ctx.needs_input_grad)
        x, weight, mean, rstd = ctx.saved_tensors
        if needs.weight_carrier or needs.bias_carrier:
            refuse_double_backward()
        elif torch.is_grad_enabled():  # second derivatives are asked for, and a norm that trains nothing has them
            scale = None if weight is None else weight.to(g.dtype)
            y = F.group_norm(x.to(g.dtype), ctx.groups, scale, None, ctx.eps)
            return tuple(_Operands(x=torch.autograd.grad(y, x, g, create_graph=True)[0]))
        d_x, d_weight, d_bias = group_norm_kernel.differentiate(g, x, ctx.groups, weight, mean, rstd)
        gradients = _Operands(
            x=d_x,
            weight_carrier=d_weight if needs.weight_carrier else None,
            bias_carrier=d_bias if needs.bias_carrier else None,
        )
        return tuple(gradients)


def _channel_affine(module: Any, normalised: Tensor, carriers: tuple[Tensor | None, ...]) -> Tensor:
    """normalised (B, channels, *space) * scale + shift; autograd sums the carriers' gradients over space."""
    y = normalised
    combines: tuple[Any, Any] = torch.mul, torch.add
    for value, combine, carrier in zip((module.weight, module.bias), combines, carriers, strict=True):
        if value is not None:
            own = value.detach().to(y.dtype)
            wide = own.expand(1, -1) if carrier is None else (own + carrier).to(y.dtype)
            y = combine(y, wide.reshape(*wide.shape, *(1,) * (y.dim() - 2)))
    return y


GROUP_NORM, INSTANCE_NORM = Rule(group_norm_forward), Rule(instance_norm_forward)
