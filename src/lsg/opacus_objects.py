"""Objects that Opacus has made private already, refused by name: each comes with the original that lsg wants."""

from typing import Any

from torch import nn

from lsg.errors import ConfigurationError


def refuse_opacus(model: Any, optimizer: Any) -> None:
    """Objects that Opacus has made private already: their clipping and noise would come on top of lsg's."""
    if is_from_opacus(model, "AbstractGradSampleHooks"):
        raise ConfigurationError(
            f"module is Opacus's {type(model).__name__}: pass the original model (its to_standard_module() returns it)"
        )
    if isinstance(model, nn.Module):
        for name, module in model.named_modules():
            if is_from_opacus(module, "AbstractGradSampleHooks") or getattr(module, "autograd_grad_sample_hooks", None):
                raise ConfigurationError(
                    f"module '{name or 'model'}' ({type(module).__name__}) carries Opacus's per-sample hooks: pass the "
                    "model without them (call to_standard_module(), or make it anew)"
                )
    if is_from_opacus(optimizer, "DPOptimizer"):
        raise ConfigurationError(
            f"optimizer is Opacus's {type(optimizer).__name__}, which clips and adds noise by itself: pass the "
            "original one (its original_optimizer)"
        )


def is_from_opacus(value: Any, name: str) -> bool:
    """Whether it is an instance of Opacus's class of that name, which need not be imported for this."""
    return any(c.__name__ == name and c.__module__.split(".")[0] == "opacus" for c in type(value).__mro__)
