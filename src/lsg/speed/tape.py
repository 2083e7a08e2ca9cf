"""Tapes: record what a function does with tensors, and do it again on the same memory, as CUDA graphs do."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Tape(Protocol):
    """Records what a function does with tensors; returns its results and a way to compute them again in place."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Wraps a run before the recording, in which libraries do their set-up."""

    def as_recorded(self) -> AbstractContextManager[None]:
        """Wraps a plain run that must take the same kernels as a recorded one."""

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]: ...


class CudaTape:
    """Records CUDA graphs that share memory: only one may be between its forward and the end of its backward."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream()  # one for all rehearsals: libraries and PyTorch keep memory for each stream

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Runs the block on a stream of its own, as PyTorch asks for before a recording."""
        self._aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._aside), self.as_recorded():
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self._aside)

    @contextmanager
    def as_recorded(self) -> Iterator[None]:
        """Tells models that ask that they are recorded: transformers then builds masks that take other kernels."""
        asked = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: True
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = asked

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()):  # restores the stream if the recording fails
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    results = run()
            except RuntimeError:
                with torch.cuda.graph(torch.cuda.CUDAGraph()):  # restores PyTorch's generator, too
                    torch.ones((), device="cuda").add_(1)
                raise
        return results, graph.replay
