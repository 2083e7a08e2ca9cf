"""Runs a model's forward and finds the tensors that it reads beside its inputs, parameters and buffers.

A recording would go on reading the memory of such a tensor, even when that holds a later batch's data.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lsg.parameters.factored_calls import zeros

_CARRIER_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Attribute:
    """A tensor that a module has as a plain attribute, as it was when the forward was recorded."""

    module: nn.Module
    path: str
    name: str
    tensor: Tensor  # kept alive, so that its memory goes to nothing else

    def is_in_place(self) -> bool:
        """Whether the attribute is still in the memory that replays read. Its numbers may have changed."""
        now = self.module.__dict__.get(self.name)
        return isinstance(now, Tensor) and _layout(now) == _layout(self.tensor)

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def outside_reads(
    run: Callable[[], Any], model: nn.Module, inputs: Iterable[Any], own: Iterable[Any]
) -> tuple[list[Attribute], list[Tensor]]:
    """Runs `run` without compilers. Returns the modules' attributes that it reads, then all other outside tensors.

    own: objects of lsg (slots) whose tensors a forward may read.
    """
    device = next(model.parameters()).device
    carriers = [zeros((1,), dtype, device) for dtype in _CARRIER_DTYPES]
    known = [*model.parameters(), *model.buffers(), *carriers, *_tensors([list(inputs), list(own)], depth=6)]
    reads = _Reads({_memory(tensor) for tensor in known})
    with torch.compiler.set_stance("force_eager"), reads:
        run()
    attributes = {
        _memory(value): Attribute(module, path, name, value)
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor)
    }
    found = [attributes[memory] for memory in reads.outside if memory in attributes]
    return found, [tensor for memory, tensor in reads.outside.items() if memory not in attributes]


class _Reads(TorchDispatchMode):
    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known = known
        self.outside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # made by `torch.tensor(...)` from Python's numbers
            for tensor in _tensors_among((args, kwargs)):
                if _memory(tensor) not in self._known and not _is_number(tensor):
                    self.outside.setdefault(_memory(tensor), tensor)
        out = func(*args, **kwargs)
        self._known.update(_memory(tensor) for tensor in _tensors_among(out))
        return out


def _is_number(tensor: Tensor) -> bool:
    """Whether it is one number in the processor's memory: a recording keeps its value and does not read it again."""
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def _tensors_among(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Tensors in containers and in the attributes of objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module | type):
        if isinstance(value, dict):
            inside: Any = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            inside = value
        else:
            inside = vars(value).values() if hasattr(value, "__dict__") else ()
        for part in list(inside):
            yield from _tensors(part, depth - 1)


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse tensors, for example, have several storages
        return id(tensor)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
