"""Looks at what a model's modules hold in Python. A recording runs no Python, so it would miss changes of that."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

_NUMBER = (bool, int, float, str)
_CONTAINERS = (list, dict, set, deque, tuple)
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_KNOWN_HOOKS = ("lsg.", "transformers.utils.output_capturing")  # the second only collects outputs
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def numbers(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """The numbers, switches and words among the modules' attributes, in order. This runs at each forward."""
    return tuple(value for module in modules for value in module.__dict__.values() if type(value) in _NUMBER)


def number_names(model: nn.Module) -> list[str]:
    """The names that belong to `numbers` of all modules of the model, in the same order."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if type(value) in _NUMBER
    ]


def hooked(modules: Sequence[nn.Module]) -> nn.Module | None:
    """A module with a hook that is not lsg's, which a replay would not call; or None. This runs at each forward."""
    for module in modules:
        for name in _HOOKS:
            hooks = module.__dict__[name]
            if hooks and any(_is_foreign(hook) for hook in hooks.values()):
                return module
    return None


def _is_foreign(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(_KNOWN_HOOKS)


def python_state(model: nn.Module) -> dict[str, Any]:
    """Name of an attribute -> a mark that changes when a forward changes the attribute.

    The mark is a number's value, a tensor's identity, a container's contents; objects are looked into once. A tensor's
    numbers may change: a replay changes them as well.
    """
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in [*module.__dict__.items(), *module._buffers.items(), *module._parameters.items()]:
            if name in _OWN or name.startswith("_lsg"):
                continue
            found[prefix + name] = _mark(value)
            if hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type) and not callable(value):
                found |= {f"{prefix}{name}.{inner}": _mark(v) for inner, v in vars(value).items()}
    return found


def changed_name(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The name of the first attribute whose mark has changed; None if none has."""
    return next((name for name in {**before, **after} if before.get(name) != after.get(name)), None)


def _mark(value: Any) -> Any:
    if isinstance(value, _NUMBER):
        return type(value), value if value == value else "nan"
    if isinstance(value, _CONTAINERS):
        inside = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        return id(value), [part if isinstance(part, _NUMBER) else id(part) for part in inside]
    return id(value)
