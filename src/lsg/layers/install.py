"""Puts a patched module on its module, and takes it off again.

The module stays the same object of the same class: only its instance gets a `forward`, a bound method, and a `_lsg`
attribute. On a copy or a pickle of the module both are inert: it behaves as any module of its class.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lsg.layers.instance_methods import register_patch, swap_in, swap_out
from lsg.layers.patched_module import PatchedModule
from lsg.layers.samples import leaves_of


def patch_of(module: nn.Module) -> PatchedModule | None:
    """The patched module that a module has, if any."""
    patched = module.__dict__.get("_lsg")
    assert patched is None or isinstance(patched, PatchedModule)
    return patched


def _through_rule(method: str) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        patched: PatchedModule | None = self.__dict__["_lsg"]
        if patched is None:  # a copy of a private model has no rules
            return getattr(type(self), method)(self, *args, **kwargs)
        batch = patched.batch
        if patched.for_speed:
            return patched.rule(self, patched, *args, **kwargs)
        if batch.watch is not None:
            return batch.watch(self, patched, args, kwargs)
        if not torch.is_grad_enabled():
            return patched.own_forward(*args, **kwargs)
        number, places = patched.calls, patched.places(leaves_of(args, kwargs))
        out = patched.rule(self, patched, places, *args, **kwargs)
        if batch.witness is not None:
            batch.witness(patched, number, out)
        return out

    forward.__name__ = method  # a pickled bound method is looked up by name: the class's own is found
    return forward


_METHODS = ("forward", "compute_bias", "compute_position_bias", "get_prompt")
_PATCHES: dict[str, Callable[..., Any]] = {method: _through_rule(method) for method in _METHODS}
for _patch in _PATCHES.values():
    register_patch(_patch, "_lsg")


def is_private(model: nn.Module) -> bool:
    """Whether an engine trains the model or a part of it."""
    patched_modules = (patch_of(module) for module in model.modules())
    return any(patched is not None and patched.slots for patched in patched_modules)


def install(module: nn.Module, patched: PatchedModule) -> None:
    """In place of one that is there for speed alone, if there is one."""
    before = patch_of(module)
    if before is not None:
        uninstall(module, before)
    patched.replace(swap_in(module, patched.method, _PATCHES[patched.method]))
    module.__dict__["_lsg"] = patched


def patched_method(module: nn.Module, patched: PatchedModule) -> Callable[..., Any]:
    """A method of the module that goes through its rule, for whoever calls it in place of the module's own."""
    module.__dict__["_lsg"] = patched
    return types.MethodType(_PATCHES[patched.method], module)


def uninstall(module: nn.Module, patched: PatchedModule) -> None:
    """Nothing where another patched module has taken its place."""
    if patch_of(module) is patched:
        del module.__dict__["_lsg"]
        swap_out(module, patched.method, patched.own_forward)
