"""Positions that a model scales anew for batches longer than it was pretrained with (transformers' rope types "dynamic"
and "longrope").

They are scaled by the length of the longest record, so that it changes what the model says of all others: no clipping
of single records would protect it. A mask does not help. So each such module is watched, and refused when that happens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lsg.errors import PrivacyError


def watch_scaled_positions(model: nn.Module) -> list[RemovableHandle]:
    """From now on, until the handles are removed, a batch that scales positions raises PrivacyError in training."""
    return [
        module.register_forward_pre_hook(_RefuseLonger(name, end), with_kwargs=True)
        for name, module in model.named_modules()
        if (end := _end(module)) is not None
    ]


def _end(module: nn.Module) -> int | None:
    """How many tokens have positions that depend on nothing; None where all have."""
    kinds = getattr(module, "rope_type", None)
    kinds = list(kinds.values()) if isinstance(kinds, Mapping) else [kinds]
    ends = []
    if any(isinstance(kind, str) and "dynamic" in kind for kind in kinds):
        ends.append(int(getattr(module, "original_max_seq_len", 0)))
    if "longrope" in kinds:
        settings = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        nested = [part for part in settings.values() if isinstance(part, Mapping)]
        ends += [int(part.get("original_max_position_embeddings") or 0) for part in nested or [settings]]
    return min(ends, default=None)


class _RefuseLonger:
    """A hook. On a copy of the model it does nothing."""

    def __init__(self, name: str | None, end: int) -> None:
        self._name, self._end = name, end

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._name is None or not torch.is_grad_enabled():
            return
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if isinstance(positions, Tensor) and positions.shape[-1] > self._end:
            raise PrivacyError(
                f"module '{self._name}' ({type(module).__name__}) scales positions by the longest record of a batch, "
                f"here of {positions.shape[-1]} tokens, so that it would change the others' gradients: cut records at "
                f"the {self._end} tokens that the model was pretrained with"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "_RefuseLonger":
        return _RefuseLonger(None, 0)

    def __reduce__(self) -> Any:
        return _RefuseLonger, (None, 0)
