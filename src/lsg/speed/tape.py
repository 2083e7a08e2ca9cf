"""Tapes: what a function does with tensors is recorded, and done again on the same memory, as by CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Tape(Protocol):
    """Records what a function does with tensors; returns its results and a way to compute them again in place."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Around a run before the recording, in which libraries do what they do once."""

    def as_recorded(self) -> AbstractContextManager[None]:
        """Around a run that is to do what a recorded one does."""

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]: ...


class CudaTape:
    """Recordings that share memory: only one of them is between its forward and the end of its backward at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream()  # always the same: libraries and PyTorch keep memory for each

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """On a stream of its own."""
        self._aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._aside), self.as_recorded():
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self._aside)

    @contextmanager
    def as_recorded(self) -> Iterator[None]:
        """Models that ask whether they are being recorded (transformers builds other attention masks then, which take
        other kernels) are told so."""
        asked = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: True
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = asked

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()):  # a recording that fails does not go back to it by itself
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    results = run()
            except RuntimeError:
                with torch.cuda.graph(torch.cuda.CUDAGraph()):  # nor does PyTorch's generator, before one succeeds
                    torch.ones((), device="cuda").add_(1)
                raise
        return results, graph.replay
