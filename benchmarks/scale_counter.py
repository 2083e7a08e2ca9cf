"""Collectives of torch.distributed in, their bytes out: counts what this process and its group hand to each other."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional")  # calls of torch.distributed, and those of DTensor and FSDP2
_WITHOUT_DATA = ("barrier", "monitored_barrier", "wait_tensor")


class CollectiveBytes(TorchDispatchMode):
    """While it is on: kind of collective -> bytes of the whole tensors, and calls.

    It sees what the dispatcher sees, so that DDP's all-reduces, which C++ starts, count as those that Python asks for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def clear(self) -> None:
        self.bytes.clear()
        self.calls.clear()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = func._schema.name.partition("::")[2].strip("_")
        if func.namespace in _NAMESPACES and kind not in _WITHOUT_DATA:
            self.calls[kind] += 1
            # On one side is the whole tensor, on the other it, too, or a process's share of it.
            self.bytes[kind] += max(_size(side) for side in (*args, out))
        return out


def _size(side: Any) -> int:
    """Bytes of a tensor, or of all tensors of a list; 0 for what is neither."""
    if isinstance(side, Tensor):
        return side.numel() * side.element_size()
    return sum(_size(each) for each in side) if isinstance(side, list | tuple) else 0
