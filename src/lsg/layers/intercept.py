"""Subclasses of known layers with a forward of their own (`super().forward(index + offset)`): the functional call
inside is intercepted and goes through the rule of the family."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lsg.errors import PrivacyError
from lsg.layers.embedding import embedding
from lsg.layers.linear import linear, weight_slots
from lsg.layers.site import Site


class _Redirect(TorchFunctionMode):
    """Sends `F.linear` and `F.embedding` on the module's own weight through their rules; all else runs as it is."""

    def __init__(self, module: nn.Module, site: Site) -> None:
        self.site, self.weight = site, module.get_parameter("weight")

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and args[1] is self.weight:
            padding_idx = args[2] if len(args) > 2 else kwargs.get("padding_idx")
            return embedding(self.site, args[0], self.weight, padding_idx)
        if func is F.linear and args[1] is self.weight:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            bias_slot = self.site.slots.get("bias")
            if bias_slot is not None and bias is not bias_slot.parameter:
                bias_slot = None
            return linear(self.site, args[0], self.weight, bias, weight_slots(self.site), bias_slot)
        return func(*args, **kwargs)


def intercepted_forward(module: nn.Module, site: Site, *args: Any, **kwargs: Any) -> Tensor:
    """The module's own forward with its functional call redirected."""
    with _Redirect(module, site):
        out: Tensor = site.plain(*args, **kwargs)
    if not out.requires_grad:
        raise PrivacyError(f"layer '{site.name}' ({type(module).__name__}) uses its weight in a way that has no rule")
    return out
