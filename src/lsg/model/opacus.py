"""What belongs to Opacus: objects that it has made private already, refused by name with the original that lsg wants;
and arguments of its `make_private` that lsg has no use for, accepted where they change nothing."""

from typing import Any

from torch import nn

from lsg.errors import ConfigurationError

_SAME_GRADIENTS = ("hooks", "functorch", "ew")


def check_opacus_arguments(function: str, given: dict[str, Any]) -> None:
    for name in given:
        if name not in ("grad_sample_mode", "criterion", "wrap_model", "rand_on_empty"):
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    mode = given.get("grad_sample_mode", "hooks")
    if mode not in _SAME_GRADIENTS:
        raise ConfigurationError(
            f"grad_sample_mode={mode!r}: lsg has one way to per-sample gradients, which needs no criterion and no more "
            "memory than plain training. Leave the argument out, and unpack model, optimizer and loader"
        )
    if given.get("rand_on_empty", False):
        raise ConfigurationError("rand_on_empty=True: lsg's loader takes the step of an empty batch by itself")


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
