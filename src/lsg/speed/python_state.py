"""What a model's modules hold in Python: a recording, which runs no Python, must not miss a change of it."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

_NUMBER = (bool, int, float, str)
_CONTAINERS = (list, dict, set, deque, tuple)
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_KNOWN_HOOKS = ("lsg.", "transformers.utils.output_capturing")  # the latter hand on what the model returns
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def numbers(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Numbers, switches and words among the modules' attributes, in order. Computed at each forward."""
    return tuple(value for module in modules for value in module.__dict__.values() if type(value) in _NUMBER)


def number_names(model: nn.Module) -> list[str]:
    """The names of the `numbers` of all its modules."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if type(value) in _NUMBER
    ]


def hooked(modules: Sequence[nn.Module]) -> nn.Module | None:
    """One with a hook that nobody knows, which may do anything and which a replay does not call. Run each time."""
    for module in modules:
        for name in _HOOKS:
            hooks = module.__dict__[name]
            if hooks and any(_is_foreign(hook) for hook in hooks.values()):
                return module
    return None


def _is_foreign(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(_KNOWN_HOOKS)


def python_state(model: nn.Module) -> dict[str, Any]:
    """Name -> what tells a change of the attribute by a forward: a number's value, which tensor it is, what a container
    holds, and the same of an object's own attributes. That a tensor's numbers change is no matter: a replay changes
    them as well."""
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
    """Of an attribute that is another one now."""
    return next((name for name in {**before, **after} if before.get(name) != after.get(name)), None)


def _mark(value: Any) -> Any:
    if isinstance(value, _NUMBER):
        return type(value), value if value == value else "nan"
    if isinstance(value, _CONTAINERS):
        inside = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        return id(value), [part if isinstance(part, _NUMBER) else id(part) for part in inside]
    return id(value)
