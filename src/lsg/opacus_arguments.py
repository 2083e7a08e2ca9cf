"""Arguments of Opacus's `make_private` that lsg has no use for: accepted where they change nothing, refused by name
elsewhere."""

from typing import Any

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
