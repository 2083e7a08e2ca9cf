"""Replays beside plain runs: which replays are compared, and which of their numbers differ."""

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST = 3  # replays of a recording that are all compared
_RARE = 1024  # from here on every so many; up to here at powers of two
_SMALL = 0.1  # of the largest: what is smaller may be nothing but rounding (an attention's bias of keys)


def is_due(replay: int) -> bool:
    """Whether a recording's replay of this number, from 1, is compared: often at first, and for ever now and then."""
    return replay <= _FIRST or replay % _RARE == 0 or (replay < _RARE and replay & (replay - 1) == 0)


def tolerance(device_type: str, dtypes: set[torch.dtype]) -> float:
    """How far two ways to compute the same may be apart, of its size. A replay mostly runs the plain run's own kernels;
    libraries may choose others for it."""
    low = {torch.bfloat16, torch.float16}
    if torch.is_autocast_enabled(device_type) or dtypes & low:
        return 5e-2
    if device_type == "cuda" and torch.float32 in dtypes:
        tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
        return 2e-2 if tf32 else 1e-3
    return 1e-3


def probe_like(gradient: Tensor) -> Tensor:
    """An output's gradient to compare with: the same numbers each time, none of them drawn."""
    return torch.arange(gradient.numel(), device=gradient.device).cos().to(gradient.dtype).view(gradient.shape)


def first_difference(
    names: Sequence[str], replayed: Sequence[Tensor], plain: Sequence[Tensor], within: float
) -> str | None:
    """The name of a tensor that is not the same in both, with how much it differs."""
    sizes = [_size(tensor) for tensor in plain]
    floor = _SMALL * max(sizes, default=0.0)
    for name, a, b, size in zip(names, replayed, plain, sizes, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} has another shape"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return name
            continue
        apart = _size(a.float() - b.float())
        if apart > within * max(size, floor):
            return f"{name}, by {apart / max(size, floor, 1e-30):.1%}"
    return None


def _size(tensor: Tensor) -> float:
    """Without what is not finite: a sample whose gradient is not does not enter a sum, either."""
    return float(tensor.float().nan_to_num(0, 0, 0).norm())
