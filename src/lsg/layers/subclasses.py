"""Subclasses of known layers with a forward of their own: where that is a functional call on the module's own weight
(`super().forward(index + offset)`), the call is intercepted and goes through the rule of the family.

One that does anything else with its parameters (an equalised learning rate, LoRA) runs sample by sample instead.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lsg.errors import PrivacyError
from lsg.layers.embedding import EMBEDDING, embedding
from lsg.layers.fallback import LOOKUP, arguments, fallback_forward, refuse_batch_dependent
from lsg.layers.linear import LINEAR, linear, weight_slots
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rule import Rule
from lsg.layers.samples import Axis, SamplePlaces

FUNCTION = "function"  # stands before the input of a function in a call's leaves: it is no call of the module


class _OtherUse(Exception):  # noqa: N818 - no error: told to `intercepted_forward` alone
    """A trained parameter is used in a way that has no rule."""


class _Redirect(TorchFunctionMode):
    """Sends `F.linear` and `F.embedding` on the module's own weight through their rules; all else runs as it is."""

    def __init__(self, module: Any, patched: PatchedModule) -> None:
        self._patched, self._weight, self._bias = patched, module.weight, getattr(module, "bias", None)
        self._trained = [slot.in_use for slot in patched.slots.values()]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            call = arguments(LOOKUP, args, kwargs)
            if call["weight"] is self._weight and "weight" in self._patched.slots:
                refuse_batch_dependent(self._patched.name, call)
                axis = self._axis(call["input"])
                return embedding(self._patched, axis, call["input"], self._weight, call["padding_idx"])
        if func is F.linear:
            call = arguments(("input", "weight", "bias"), args, kwargs)
            bias = call["bias"]
            if call["weight"] is self._weight and (bias is None or bias is self._bias):
                bias_slot = None if bias is None else self._patched.slots.get("bias")
                x, slots = call["input"], weight_slots(self._patched)
                return linear(self._patched, self._axis(x), x, self._weight, bias, slots, bias_slot)
        out = func(*args, **kwargs)
        if torch.is_grad_enabled() and _has_gradient(out) and self._uses_trained((args, kwargs)):
            raise _OtherUse
        return out

    def _axis(self, x: Tensor) -> Axis:
        return self._patched.places([FUNCTION, x]).input(1)

    def _uses_trained(self, inputs: Any) -> bool:
        return any(leaf is parameter for leaf in pytree.tree_leaves(inputs) for parameter in self._trained)


class Listen(TorchFunctionMode):
    """Tells of the inputs that `_Redirect` would send through a rule; everything runs as it is."""

    def __init__(self, module: Any, tell: Callable[[Tensor, Any], None]) -> None:
        self._weight, self._tell = module.weight, tell

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.embedding or func is F.linear:
            names = LOOKUP if func is F.embedding else ("input", "weight", "bias")
            call = arguments(names, args, kwargs or {})
            if call["weight"] is self._weight:
                self._tell(call["input"], out)
        return out


def _has_gradient(out: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(out))


def intercepted_forward(
    module: nn.Module, patched: PatchedModule, places: SamplePlaces, *args: Any, **kwargs: Any
) -> Any:
    """The module's own forward, with its functional call redirected where it is one."""
    try:
        with _Redirect(module, patched):
            out = patched.own_forward(*args, **kwargs)
    except _OtherUse:
        if patched.is_intercepted:  # the check at the first batch has seen another layer than this
            raise PrivacyError(
                f"layer '{patched.name}' ({type(module).__name__}) uses its parameters in another way than before: let "
                "its forward do the same at each call"
            ) from None
        patched.change_rule(fallback_forward)
        return fallback_forward(module, patched, places, *args, **kwargs)
    patched.note_interception()
    if not _has_gradient(out):
        raise PrivacyError(
            f"layer '{patched.name}' ({type(module).__name__}) uses its weight in a way that has no rule"
        )
    return out


LINEAR_SUBCLASS = Rule(intercepted_forward, LINEAR.layouts, known=None, fused=LINEAR.fused)
EMBEDDING_SUBCLASS = Rule(intercepted_forward, EMBEDDING.layouts, known=None)
