"""Tapes for machines without a GPU, and a way to have the engine use them in place of CUDA graphs."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lsg import PerfConfig


class AgainTape:
    """Runs a function again and writes its results over the old ones, as a replayed graph does."""

    replays = 0

    def rehearsal(self) -> Any:
        return self.as_recorded()

    def as_recorded(self) -> Any:
        return nullcontext()

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        results = run()

        def replay() -> None:
            AgainTape.replays += 1
            with torch.enable_grad():
                again = run()
            for old, new in zip(results, again, strict=True):
                old.copy_(new)

        return results, replay


class StillTape(AgainTape):
    """Replays leave the results as they were recorded."""

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        def replay() -> None:
            AgainTape.replays += 1

        return run(), replay


class BrokenTape(AgainTape):
    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing")


class KernelTape(AgainTape):
    """As a CUDA graph: replays what PyTorch's operations did, on the same memory, and runs no Python of the model."""

    def as_recorded(self) -> Any:
        return mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        assert not gc.isenabled()  # a graph that is freed meanwhile ends the recording
        with self.as_recorded(), _Operations() as recorded:
            results = run()

        def replay() -> None:
            AgainTape.replays += 1
            with torch.no_grad():
                for operation, args, kwargs, made in recorded.done:
                    again = operation(*args, **kwargs)
                    for old, new in zip(_tensors(made), _tensors(again), strict=True):
                        if new.data_ptr() != old.data_ptr():
                            old.copy_(new)

        return results, replay


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, made))
        return made


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def use_tape(monkeypatch: pytest.MonkeyPatch, kind: type, *, compares: bool = True) -> None:
    """From now on CPUs record, on tapes of this kind. compares: whether replays are compared with plain runs."""
    AgainTape.replays = 0
    monkeypatch.setattr("lsg.model.attachment.CudaTape", kind)
    monkeypatch.setattr("lsg.model.non_private.CudaTape", kind)
    monkeypatch.setattr(PerfConfig, "graphs", lambda self, device: self.cuda_graphs is not False)
    # The refresh itself cannot be recorded without a GPU. Its results then move at each logical step.
    monkeypatch.setattr("lsg.parameters.refresh.Refresh._record", lambda self, sparsity: self._run(sparsity))
    if not compares:
        monkeypatch.setattr("lsg.speed.graphs.is_due", lambda replay: False)
