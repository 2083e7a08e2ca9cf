"""Replaces methods of one module, not of its class: put on, told from others, taken off again.

A copy or a pickle of a module carries the replaced method along, and no owner: there it is inert.
"""

import types
from collections.abc import Callable
from typing import Any

from torch import nn

# Code of every method that lsg puts on an instance -> the attribute that holds its owner, None on copies.
_OWNERS: dict[Any, str] = {}


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody else has put a forward on this instance. A copy of a private module carries an inert one."""
    own = module.__dict__.get("forward")
    return own is not None and not _is_inert(module, own) and _code(own) not in _OWNERS


def register_patch(patch: Callable[..., Any], owner: str) -> None:
    """owner: the attribute of an instance that holds whoever has put this method there."""
    _OWNERS[patch.__code__] = owner


def _code(method: Any) -> Any:
    """Of a bound method, under whatever signature."""
    return getattr(getattr(method, "__func__", None), "__code__", None)


def _is_inert(module: nn.Module, method: Any) -> bool:
    """Whether a method came with a copy of a private module."""
    owner = _OWNERS.get(_code(method))
    return owner is not None and module.__dict__.get(owner) is None


def swap_in(module: nn.Module, method: str, patch: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method on this instance alone. Returns what it had, without the inert patch that a copy carries."""
    if _is_inert(module, module.__dict__.get(method)):
        del module.__dict__[method]
    replaced: Callable[..., Any] = getattr(module, method)
    setattr(module, method, types.MethodType(patch, module))
    return replaced


def swap_out(module: nn.Module, method: str, replaced: Callable[..., Any]) -> None:
    """Undo `swap_in`."""
    delattr(module, method)
    if getattr(replaced, "__func__", None) is not getattr(type(module), method):
        setattr(module, method, replaced)  # the instance had a method of its own before


def nothing() -> None:
    """What a pickle of an owner is loaded as."""
