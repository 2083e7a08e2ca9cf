"""Compares replays with plain runs: says which replays are compared, and which of their numbers differ."""

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST = 3  # each of a recording's first replays is compared
_RARE = 1024  # later ones are compared at powers of two up to this number, then at its multiples
_SMALL = 0.1  # a tensor below this share of the largest may be rounding alone, as an attention's bias of keys is


def is_due(replay: int) -> bool:
    """Whether a recording's n-th replay, counted from 1, is compared: often at first, rarely later, without an end."""
    return replay <= _FIRST or replay % _RARE == 0 or (replay < _RARE and replay & (replay - 1) == 0)


def tolerance(device_type: str, dtypes: set[torch.dtype]) -> float:
    """The difference, relative to a tensor's size, that rounding may make between a replay and a plain run.

    Both mostly run the same kernels, but libraries may choose others for a replay.
    """
    low = {torch.bfloat16, torch.float16}
    if torch.is_autocast_enabled(device_type) or dtypes & low:
        return 5e-2
    if device_type == "cuda" and torch.float32 in dtypes:
        tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
        return 2e-2 if tf32 else 1e-3
    return 1e-3


def probe_like(gradient: Tensor) -> Tensor:
    """Makes an output gradient for comparisons. It has the same numbers each time, and draws none."""
    return torch.arange(gradient.numel(), device=gradient.device).cos().to(gradient.dtype).view(gradient.shape)


def first_difference(
    names: Sequence[str], replayed: Sequence[Tensor], plain: Sequence[Tensor], within: float
) -> str | None:
    """Returns the name of the first tensor that differs, and by how much; None if all agree."""
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
    """The norm without numbers that are not finite: a sample with such a gradient enters no sum, either."""
    return float(tensor.float().nan_to_num(0, 0, 0).norm())
