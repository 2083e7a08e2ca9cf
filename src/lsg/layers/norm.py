"""LayerNorm, GroupNorm and InstanceNorm with affine parameters; per-sample gradients of scale and shift.

All three are y = normalised(x) * scale + shift, so a sample's gradients are sums of g * normalised(x) and of g over
the positions that share a parameter. RMS norms go through the vmap fallback, which does just that for them.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.kernels import group_norm_kernel, norm_kernel
from lsg.layers.autograd_functions import fixed_signature, refuse_double_backward
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rows import Rows
from lsg.layers.rule import Rule
from lsg.layers.samples import SamplePlaces


class _LayerNorm(torch.autograd.Function):
    """Layer norm of x (B, ..., *shape) over `shape`, with carriers (B, *shape) for scale and shift."""

    generate_vmap_rule = True

    @staticmethod
    @fixed_signature
    def forward(
        x: Tensor,
        shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        weight_carrier: Tensor | None,
        bias_carrier: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, shape, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, shape, weight, bias, *_ = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape = shape

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        g = grads[0].contiguous()
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        d_x = None
        if needs[0]:
            only_x = [True, False, False]
            d_x = torch.ops.aten.native_layer_norm_backward(g, x, ctx.shape, mean, rstd, weight, bias, only_x)[0]
        d_weight: Tensor | None
        d_bias: Tensor | None
        if needs[5] and needs[6] and norm_kernel.is_faster(x):
            d_weight, d_bias = _by_kernel(x, g, mean, rstd, ctx.shape)
        else:
            d_weight = _sum_positions(g * ((x - mean) * rstd), ctx.shape) if needs[5] else None
            d_bias = _sum_positions(g, ctx.shape) if needs[6] else None
        return d_x, None, None, None, None, d_weight, d_bias


def _by_kernel(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    batch, width = x.shape[0], math.prod(shape)
    flat = (t.reshape(batch, -1, width) for t in (x, g))
    found = norm_kernel.scale_and_shift_gradients(*flat, *(t.reshape(batch, -1).float() for t in (mean, rstd)))
    return found[0].view(batch, *shape), found[1].view(batch, *shape)


def _sum_positions(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(B, ..., *shape) -> (B, *shape)."""
    return values.reshape(values.shape[0], -1, *shape).sum(1)


def _carrier(patched: PatchedModule, name: str) -> Tensor | None:
    slot = patched.slots.get(name)
    return slot.carriers[0] if slot else None


def _detached(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.detach().to(dtype)


def _norm_dtype(x: Tensor) -> torch.dtype:
    """Norms run in float32 under autocast, as PyTorch's own do on a GPU."""
    lower = torch.is_autocast_enabled(x.device.type) and x.dtype.itemsize < 4
    return torch.float32 if lower else x.dtype


def _norm_input(x: Tensor) -> Tensor:
    return x.to(_norm_dtype(x))


def layer_norm_forward(module: nn.LayerNorm, patched: PatchedModule, places: SamplePlaces, input: Tensor) -> Tensor:
    shape, axis = tuple(module.normalized_shape), places.input()
    x = _norm_input(patched.split(input, axis))
    weight, bias = _detached(module.weight, x.dtype), _detached(module.bias, x.dtype)
    carriers = _carrier(patched, "weight"), _carrier(patched, "bias")
    y: Tensor = _LayerNorm.apply(x, shape, weight, bias, module.eps, *carriers)[0]
    return axis.join(y, input, patched.size)


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
    if not trained and _kernel_pays(module, patched, input, module.num_groups):
        return _by_group_norm_kernel(module, patched, input, module.num_groups, (None, None))
    return patched.own_forward(input)


def _group_norm(module: Any, patched: PatchedModule, images: Rows, groups: int) -> Tensor:
    x = images.x
    weight, bias = (_carrier(patched, name) for name in ("weight", "bias"))
    carriers = tuple(None if carrier is None else images.carrier(carrier) for carrier in (weight, bias))
    if _kernel_pays(module, patched, x, groups):
        return images.back(_by_group_norm_kernel(module, patched, x, groups, carriers))
    normalised = F.group_norm(_norm_input(x), groups, None, None, module.eps)
    return images.back(_channel_affine(module, normalised, carriers))


def _kernel_pays(module: Any, patched: PatchedModule, x: Tensor, groups: int) -> bool:
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
    values = (None if value is None else value.detach().contiguous() for value in (module.weight, module.bias))
    y: Tensor = _GroupNorm.apply(x, groups, *values, module.eps, _norm_dtype(x), *carriers)[0]
    return y


class _GroupNorm(torch.autograd.Function):
    """Group norm of x (B, channels, height, width) by kernels, with carriers (B, channels) for scale and shift."""

    @staticmethod
    @fixed_signature
    def forward(
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
        weight_carrier: Tensor | None,
        bias_carrier: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return group_norm_kernel.normalise(x, groups, weight, bias, eps, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, ctx.groups, weight, _, ctx.eps, *_ = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(x, weight, mean, rstd)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, needs = grads[0], ctx.needs_input_grad
        x, weight, mean, rstd = ctx.saved_tensors
        if needs[6] or needs[7]:
            refuse_double_backward()
        elif torch.is_grad_enabled():  # second derivatives are asked for, and a norm that trains nothing has them
            scale = None if weight is None else weight.to(g.dtype)
            y = F.group_norm(x.to(g.dtype), ctx.groups, scale, None, ctx.eps)
            return (*torch.autograd.grad(y, x, g, create_graph=True), *(None,) * 7)
        d_x, d_weight, d_bias = group_norm_kernel.differentiate(g, x, ctx.groups, weight, mean, rstd)
        return d_x, None, None, None, None, None, d_weight if needs[6] else None, d_bias if needs[7] else None


def _channel_affine(module: Any, normalised: Tensor, carriers: tuple[Tensor | None, ...]) -> Tensor:
    """normalised (B, channels, *space) * scale + shift; autograd sums the carriers' gradients over space."""
    y = normalised
    combines: tuple[Any, Any] = torch.mul, torch.add
    for value, combine, carrier in zip((module.weight, module.bias), combines, carriers, strict=True):
        if value is not None:
            plain = value.detach().to(y.dtype)
            wide = plain.expand(1, -1) if carrier is None else (plain + carrier).to(y.dtype)
            y = combine(y, wide.reshape(*wide.shape, *(1,) * (y.dim() - 2)))
    return y


LAYER_NORM, GROUP_NORM, INSTANCE_NORM = Rule(layer_norm_forward), Rule(group_norm_forward), Rule(instance_norm_forward)
