"""Models that write a constant as `torch.tensor(0.0, device=...)`: a copy from the host, which no CUDA graph records.

Transformers builds its attention masks so. Filling memory on the device gives the same number without a copy.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def without_host_constants(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with scalars made on the device that they are for."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _FilledConstants():
            return forward(*args, **kwargs)

    return run


class _FilledConstants(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and len(args) == 1 and type(args[0]) in (bool, int, float):
            return torch.full((), args[0], **kwargs)
        return function(*args, **kwargs)
