"""How many bytes of tensors a piece of code holds at once, beyond what was there before it."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts memory that operations inside it make, from when it is made to when its last tensor is gone.

    `peak` is the most at any time. What an operation needs and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._known.setdefault(tensor.untyped_storage()._cdata, weakref.ref(tensor.untyped_storage()))
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known() is not None:
            return

        def gone(_: Any) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
