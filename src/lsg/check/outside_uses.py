"""Weights that a module uses past the layer that they belong to (`F.linear(x, self.table.weight)`): who does it.

Such a module has to run sample by sample, with its layer's weight as one of its own parameters.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lsg.layers.patched_module import PatchedModule


class Escapes(TorchFunctionMode):
    """Notes, for a forward that runs inside, trained parameters that are used past their own module, and who does it:
    the innermost module running that contains them."""

    def __init__(self, model: nn.Module, patched_modules: Iterable[tuple[nn.Module, PatchedModule]]) -> None:
        super().__init__()
        self.found: list[tuple[nn.Module, nn.Parameter]] = []
        self._model = model
        self._users: dict[int, set[int]] = {}  # parameter -> modules that have a rule for it
        for module, patched in patched_modules:
            for slot in patched.slots.values():
                self._users.setdefault(id(slot.in_use), set()).add(id(module))
        self._running: list[nn.Module] = [model]
        self._hooks = ExitStack()

    def __enter__(self) -> "Escapes":
        for module in self._model.modules():
            self._hooks.enter_context(module.register_forward_pre_hook(self._begin, prepend=True))
            self._hooks.enter_context(module.register_forward_hook(self._end, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()

    def name(self) -> str:
        """Of the first parameter found."""
        _, parameter = self.found[0]
        return next(name for name, p in self._model.named_parameters() if p is parameter)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            for value in pytree.tree_leaves((args, kwargs)):
                users = self._users.get(id(value)) if isinstance(value, nn.Parameter) else None
                if users is not None and _has_gradient(out) and not any(id(m) in users for m in self._running):
                    self.found.append((next(m for m in reversed(self._running) if _contains(m, value)), value))
        return out


def _has_gradient(out: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(out))


def _contains(module: nn.Module, parameter: nn.Parameter) -> bool:
    return any(p is parameter for p in module.parameters())


def used_outside(name: str) -> str:
    return (
        f"parameter '{name}' was used outside its module's forward (a functional call on the weight?), so part of its "
        "gradient has no per-sample rule: call the module instead, or freeze the parameter. For a penalty on weights "
        "use the optimizer's weight_decay"
    )
