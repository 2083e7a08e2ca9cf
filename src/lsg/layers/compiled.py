"""Compiling a private model: its forward goes through torch.compile, at sizes rounded up to a few.

Only the forward proper is compiled. What decides on batches and subspaces runs before it, in hooks, so that the
compiled graph has no breaks and takes carriers and subspaces as inputs.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lsg.errors import PrivacyError
from lsg.layers.site import nothing, swap_in, swap_out


class CompiledForward:
    """Replaces a model's forward by a compiled one while gradients are on. Inert on copies, gone after `remove`."""

    def __init__(self, model: nn.Module, *, cuda_graphs: bool) -> None:
        self.seconds = 0.0  # spent in calls that compiled something
        self._model = model
        self.plain = swap_in(model, "forward", _forward)
        self._cuda_graphs = cuda_graphs
        mode = "reduce-overhead" if cuda_graphs else None
        self._compiled: Callable[..., Any] = torch.compile(self.plain, mode=mode)
        model.__dict__["_lsg_compiled"] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return (nothing, ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if self._cuda_graphs:  # gradients of the last micro-batch have been summed up: their memory may be used again
            torch.compiler.cudagraph_mark_step_begin()
        frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        start = time.perf_counter()
        out = self._compiled(*args, **kwargs)
        if torch._dynamo.utils.counters["stats"]["unique_graphs"] != frames:
            self.seconds += time.perf_counter() - start
        return out

    def remove(self) -> None:
        swap_out(self._model, "forward", self.plain)
        del self._model.__dict__["_lsg_compiled"]


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    compiled = self.__dict__["_lsg_compiled"]
    if compiled is None:
        return type(self).forward(self, *args, **kwargs)
    return compiled(*args, **kwargs)


_forward.__name__ = "forward"


def pad_rows(inputs: Any, size: int, padded: int) -> Any:
    """Every tensor of `size` rows among a model's inputs, with its first row repeated up to `padded` rows."""

    def pad(t: Tensor) -> Tensor:
        if t.dim() == 0 or t.shape[0] != size:
            return t
        return torch.cat([t, t[:1].expand(padded - size, *t.shape[1:])])

    return pytree.tree_map_only(Tensor, pad, inputs)


def cut_rows(output: Any, size: int, padded: int) -> Any:
    """The model's output without the rows that padding added: they get no gradient."""

    def cut(t: Tensor) -> Tensor:
        if t.dim() > 0 and t.shape[0] == padded:
            return t[:size]
        if t.requires_grad:
            raise PrivacyError(
                f"the model returned a result of shape {tuple(t.shape)} for a batch padded to {padded} samples, so the "
                "padding cannot be told from the samples: return one row for each sample (and compute the loss outside "
                "the model), or use PerfConfig(pad=False)"
            )
        return t

    if isinstance(output, dict):  # transformers' outputs are dicts of a class of their own
        return type(output)(**{key: cut_rows(value, size, padded) for key, value in output.items()})
    return pytree.tree_map_only(Tensor, cut, output)
