"""Surroundings for trial runs of a model: without compilers, without dropout, at weights moved at random."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_one_at_a_time = threading.RLock()
_DROPOUTS = {
    getattr(where, name)
    for where, name in [
        *((F, n) for n in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")),
        *((torch, n) for n in ("dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")),
    ]
}


@contextmanager
def eagerly() -> Iterator[None]:
    """Without compilers, and without reentrant checkpoints: they hide what is inside from autograd."""
    at_once = mock.patch.object(torch.utils.checkpoint.CheckpointFunction, "apply", _run_at_once)
    with _one_at_a_time, torch.compiler.set_stance("force_eager"), at_once:  # which hold for all threads
        yield


def _run_at_once(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """In place of a checkpoint."""
    return function(*args)


class without_dropout(TorchFunctionMode):  # noqa: N801 - reads as the context that it is
    """Dropout drops nothing: rules may draw its random numbers in another order, and runs are to be compared."""

    used = False  # whether there was any

    def __enter__(self) -> "without_dropout":
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            self.used = True
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            self.used |= bool(args[4] if len(args) > 4 else kwargs.get("dropout_p"))
            args, kwargs = (
                (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:]),
                kwargs | ({} if len(args) > 4 else {"dropout_p": 0.0}),
            )
        elif func is F.multi_head_attention_forward:
            if len(args) > 10:
                args = (*args[:10], 0.0, *args[11:])
            else:
                kwargs = kwargs | {"dropout_p": 0.0}
        return func(*args, **kwargs)


@contextmanager
def moved_parameters(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Parameters at random values near their own. A constant one (a gate at zero, LoRA's second factor, scales of one)
    gets values of its own: what it holds back comes through."""
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(17)
    try:
        for parameter in parameters:
            value = parameter.data  # without a new version: nobody has changed the weight for good
            noise = _noise(value, generator)
            if value.numel() and bool(value.min() == value.max()):
                value.copy_(0.5 * noise if value.numel() < 4096 else 0.1 * noise)
            elif value.numel():
                usual = 0.5 / value[0].numel() ** 0.5 if value.dim() > 1 else 0.1  # about the size of fresh weights
                value.add_(noise * value.float().std().mul(0.3).clamp_min(usual).to(value))
        torch.clear_autocast_cache()  # it does not notice, either
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data.copy_(value)
        torch.clear_autocast_cache()


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Normal, of a large tensor the same numbers over and over: it need not be good, only other than before."""
    count = like.numel()
    some = torch.randn(min(count, 2**16), generator=generator).to(like)
    return some.repeat(-(-count // max(1, len(some))))[:count].view(like.shape)
