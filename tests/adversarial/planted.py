"""Bugs on purpose: each is a context manager that breaks one rule of lsg, to show that the oracle would find it.

They are bugs in values that lsg itself has no way to notice, as its checks look at whether records stay apart.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from lsg.kernels import norm_reference
from lsg.layers import conv, embedding, group_norm, layer_norm, linear
from lsg.parameters.slot import Slot
from lsg.step.clipping import ClippedSum, Clipper

Bug = Callable[[], AbstractContextManager[None]]
BUGS: dict[str, Bug] = {}


def bug(plant: Callable[[], Iterator[None]]) -> Bug:
    BUGS[plant.__name__] = contextmanager(plant)
    return BUGS[plant.__name__]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def backward_changed(function: Any, carrier: str, change: Callable[[Any, Tensor, Tensor], Tensor]) -> Any:
    """The gradient that an autograd function gives to a carrier (named as among its operands) is changed:
    change(context, incoming gradient, right gradient)."""
    place = inspect.getmodule(function)._Operands._fields.index(carrier)  # type: ignore[union-attr]
    right = function.backward

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = list(right(ctx, *grads))
        if found[place] is not None:
            found[place] = change(ctx, grads[0], found[place])
        return tuple(found)

    return replaced(function, "backward", staticmethod(backward))


@bug
def linear_bias_averages_over_positions() -> Iterator[None]:
    def change(ctx: Any, g: Tensor, right: Tensor) -> Tensor:
        return g.reshape(g.shape[0], -1, g.shape[-1]).mean(1)

    with backward_changed(linear._Linear, "bias_carrier", change):
        yield


@bug
def linear_weight_forgets_a_row() -> Iterator[None]:
    def change(ctx: Any, g: Tensor, right: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(right[:, :1]), right[:, 1:]], 1)

    with backward_changed(linear._Linear, "dense_carrier", change):
        yield


@bug
def factor_has_the_wrong_sign() -> Iterator[None]:
    with backward_changed(linear._Linear, "row_carrier", lambda ctx, g, right: -right):
        yield


@bug
def second_use_of_a_layer_does_not_count() -> Iterator[None]:
    """Of several uses of one weight in a forward, the last alone has a gradient."""
    right, forward, seen = linear._Linear.backward, linear._Linear.forward, set[int]()

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, weight = right(ctx, *grads), ctx.saved_tensors[1]
        place = 0 if torch._C._are_functorch_transforms_active() else weight.data_ptr()
        if place in seen:
            return (found[0], *(None if d is None else torch.zeros_like(d) for d in found[1:]))
        seen.add(place)
        return found

    def fresh_forward(*args: Any, **kwargs: Any) -> Tensor:
        seen.clear()
        return forward(*args, **kwargs)

    fresh_forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    with (
        replaced(linear._Linear, "backward", staticmethod(backward)),
        replaced(linear._Linear, "forward", staticmethod(fresh_forward)),
    ):
        yield


@bug
def padding_is_trained() -> Iterator[None]:
    right = embedding._Embedding.backward

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.padding_idx = None
        return right(ctx, *grads)

    with replaced(embedding._Embedding, "backward", staticmethod(backward)):
        yield


@bug
def taps_are_flipped() -> Iterator[None]:
    with backward_changed(conv._Conv, "dense_carrier", lambda ctx, g, right: right.flip(-1)):
        yield


@bug
def norm_scale_forgets_the_mean() -> Iterator[None]:
    def change(ctx: Any, g: Tensor, right: Tensor) -> Tensor:
        x, _, _, _, rstd = ctx.saved_tensors
        return norm_reference.sum_positions(g * x * rstd, ctx.shape)

    with backward_changed(layer_norm._LayerNorm, "weight_carrier", change):
        yield


@bug
def shift_of_a_group_norm_is_lost() -> Iterator[None]:
    right = group_norm._channel_affine

    def affine(module: Any, normalised: Tensor, carriers: tuple[Tensor | None, ...]) -> Tensor:
        return right(module, normalised, (carriers[0], None))

    with replaced(group_norm, "_channel_affine", affine):
        yield


@bug
def own_modules_count_twice() -> Iterator[None]:
    """The vmap fallback's weight moves by twice its carrier."""
    right = Slot.moved_by

    def moved_by(self: Slot, carriers: tuple[Tensor, ...]) -> Tensor:
        return right(self, tuple(2 * carrier for carrier in carriers))

    with replaced(Slot, "moved_by", moved_by):
        yield


@bug
def entries_are_left_out_of_the_sum() -> Iterator[None]:
    """What is looked at is right; what is clipped is not."""
    right = Slot.parts

    def parts(self: Slot) -> Any:
        found = right(self)
        return [_without_last(part) if isinstance(part, Tensor) else part for part in found]

    with replaced(Slot, "parts", parts):
        yield


def _without_last(part: Tensor) -> Tensor:
    return torch.cat([part[:, :-1], torch.zeros_like(part[:, -1:])], 1)


def clip_factors_changed(change: Callable[[Clipper, Tensor, Tensor, Tensor], Tensor]) -> Any:
    """change(clipper, norms of each part, joint norms, right factors)."""
    right = Clipper._factors

    def factors(self: Clipper, norms_BK: Tensor, joint_B: Tensor, positions: Any) -> Tensor:
        return change(self, norms_BK, joint_B, right(self, norms_BK, joint_B, positions))

    return replaced(Clipper, "_factors", factors)


@bug
def clip_factor_of_the_neighbour() -> Iterator[None]:
    with clip_factors_changed(lambda clipper, norms, joint, right: right.roll(1, 0)):
        yield


@bug
def clipping_is_forgotten() -> Iterator[None]:
    with clip_factors_changed(lambda clipper, norms, joint, right: torch.ones_like(right)):
        yield


def _clip_changed(change: Callable[[Any, float], tuple[Any, float]]) -> Any:
    right = Clipper.clip

    def clip(self: Clipper, per_sample: Any, loss_scale: float, positions: Any = None) -> ClippedSum:
        return right(self, *change(per_sample, loss_scale), positions)

    return replaced(Clipper, "clip", clip)


@bug
def broken_records_are_mended() -> Iterator[None]:
    """NaN becomes zero number by number: what is left of a broken record counts."""

    def change(per_sample: Any, scale: float) -> tuple[Any, float]:
        mended = [[p.nan_to_num(0.0, 0.0, 0.0) if isinstance(p, Tensor) else p for p in parts] for parts in per_sample]
        return mended, scale

    with _clip_changed(change):
        yield


@bug
def mean_is_taken_for_a_sum() -> Iterator[None]:
    with _clip_changed(lambda per_sample, scale: (per_sample, 1.0)):
        yield
