"""A hook on a private model that does nothing on a copy or a pickle of it."""

from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """Calls `call`, outside of what a compiler traces."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = torch.compiler.disable(call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> Any:
        return _make_no_hook, ()


def no_hook(*args: Any) -> None:
    """What a copy of a private model has in place of its hooks."""


def _make_no_hook() -> Callable[..., None]:
    return no_hook
