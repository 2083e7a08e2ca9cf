"""The RMS norm of transformers' language models; per-sample gradients of its scale.

y = scale * normalised(x). Every sample gets a scale of its own, value + carrier, and autograd sums over its positions.
The vmap fallback gives the same gradients, and serves all other RMS norms. It is slower to launch, and a compiler does
not follow it into a checkpointed layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lsg.layers.norm_input import carrier_of
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rule import Rule
from lsg.layers.samples import SamplePlaces


def rms_norm_forward(module: Any, patched: PatchedModule, places: SamplePlaces, hidden_states: Tensor) -> Tensor:
    axis = places.input()
    x = patched.split(hidden_states, axis)
    carrier = carrier_of(patched, "weight")
    scale = module.weight.detach()
    if carrier is not None:
        moved = (scale + carrier).to(scale.dtype)
        scale = moved.reshape(len(moved), *(1,) * (x.dim() - 2), -1)
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    y = scale * (wide * torch.rsqrt(variance + module.variance_epsilon)).to(x.dtype)
    return axis.join(y, hidden_states, patched.size)


def is_rms_norm(module: nn.Module) -> bool:
    """Compares the forward's code: transformers has a copy of this norm under another name in each family of models.

    A norm with another formula, such as a scale of 1 + weight, has other code.
    """
    forward = type(module).forward
    own, known = getattr(forward, "__code__", None), _transformers_forward.__code__
    same = own is not None and all(getattr(own, part) == getattr(known, part) for part in _CODE)
    weight = getattr(module, "weight", None)
    return (
        same
        and forward.__globals__.get("torch") is torch
        and isinstance(weight, nn.Parameter)
        and weight.dim() == 1
        and len(list(module.parameters())) == 1
    )


_CODE = ("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_argcount", "co_kwonlyargcount")


# The forward of LlamaRMSNorm and its copies, word for word.
def _transformers_forward(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


RMS_NORM = Rule(rms_norm_forward)
