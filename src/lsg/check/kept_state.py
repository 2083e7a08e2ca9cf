"""What a model keeps from batch to batch beside its parameters: buffers, and tensors, numbers and containers among the
attributes of its modules."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lsg.distributed.sharding import is_sharded

_SINGLE = (Tensor, int, float, type(None))  # of what a module keeps, what a forward may change
_CONTAINERS = (list, dict, set, deque)
_LARGE = 2**20
_OWN = frozenset(nn.Module().__dict__) | {"_lsg", "_lsg_fast"}


def _spaces(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """Where modules keep things, with their names."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        found += [(prefix, module._buffers), (prefix, module.__dict__), (prefix, module._parameters)]
    return found


def _kept(space: dict[str, Any]) -> dict[str, Any]:
    """The entries that a forward may change; a module's own bookkeeping is left out, and so is lsg's."""
    return {
        name: value
        for name, value in space.items()
        if name not in _OWN and (isinstance(value, _SINGLE) or _is_container(name, value)) and not _is_weight(value)
    }


def _is_weight(value: Any) -> bool:
    """What is trained, or frozen and large, is no state: that a forward writes to it is not looked for."""
    return isinstance(value, nn.Parameter) and (value.requires_grad or value.numel() > _LARGE or is_sharded(value))


def _is_container(name: str, value: Any) -> bool:
    return isinstance(value, _CONTAINERS) and not name.startswith("_")


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """At the end the model keeps what it kept at the beginning."""
    restore = snapshot(model)
    try:
        yield
    finally:
        restore()


def snapshot(model: nn.Module) -> Callable[[], None]:
    """Returns what brings the model back to what it keeps now."""
    spaces = [space for _, space in _spaces(model)]
    kept = [_kept(space) for space in spaces]
    tensors = [value for found in kept for value in found.values() if isinstance(value, Tensor)]
    values = {id(t): t.detach().clone() for t in tensors if not t.is_inference()}
    contents = [{n: v.copy() for n, v in found.items() if isinstance(v, _CONTAINERS)} for found in kept]

    def restore() -> None:
        for space, found, inside in zip(spaces, kept, contents, strict=True):
            for name in [name for name, value in _kept(space).items() if name not in found]:
                if isinstance(space[name], Tensor):
                    del space[name]
            space.update({name: _as_before(value, values) for name, value in found.items() if name in space})
            for name, content in inside.items():
                _refill(space[name], content)

    return restore


@contextmanager
def changed_state(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Fills a dictionary, at the end: name -> what the model keeps now and did not keep at the beginning."""
    before = {prefix + name: _mark(value) for prefix, space in _spaces(model) for name, value in _kept(space).items()}
    changed: dict[str, Any] = {}
    yield changed
    for prefix, space in _spaces(model):
        for name, value in _kept(space).items():
            if before.get(prefix + name) != _mark(value):
                changed[prefix + name] = _content(value)


def _mark(value: Any) -> Any:
    """Another one after a change. By value: who writes through `.data` leaves no other trace."""
    if isinstance(value, Tensor):
        return _Value(value.detach().clone())
    return _identities(value) if isinstance(value, _CONTAINERS) else value


class _Value:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value) or self.tensor.shape != other.tensor.shape:
            return False
        return torch.equal(self.tensor.nan_to_num(0.5), other.tensor.nan_to_num(0.5))

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any) -> Any:
    """What can be compared with the content after another run."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, _CONTAINERS):
        return [float(t.detach().double().sum()) for t in tensors_in(value, set()) if not t.is_complex()]
    return value


def _identities(container: Any) -> list[int]:
    inside = [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)
    return [id(part) for part in inside]


def _refill(container: Any, content: Any) -> None:
    if _identities(container) != _identities(content):
        container.clear()
        container.update(content) if isinstance(container, dict | set) else container.extend(content)


def _as_before(value: Any, values: dict[int, Tensor]) -> Any:
    if id(value) not in values or _Value(value.detach()) == _Value(values[id(value)]):
        return value
    before = values[id(value)]
    if isinstance(value, nn.Parameter):
        value.data.copy_(before)
        return value
    try:
        return value.detach_().copy_(before)
    except RuntimeError:  # a view cannot be detached in place
        return before


def tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Wherever they are: in mappings, sequences and sets, and in the attributes of other objects."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, str | bytes | type | nn.Module):
        seen.add(id(value))
        if isinstance(value, Mapping):
            inside: Any = value.values()
        elif isinstance(value, list | tuple | set | frozenset | deque):
            inside = value
        else:
            inside = vars(value).values() if hasattr(value, "__dict__") else ()
        for part in list(inside):
            yield from tensors_in(part, seen)
