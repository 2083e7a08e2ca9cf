"""Tapes: what a function does with tensors is recorded, and done again on the same memory. `CudaTape` is CUDA's graphs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Tape(Protocol):
    """Records what a function does with tensors; returns its results and a way to compute them again in place."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Around a run that is not recorded and is to do what a recorded one does, as before the recording, when
        libraries do what they do once."""

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]: ...


class CudaTape:
    """Recordings that share memory: only one of them is between its forward and the end of its backward at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """On a stream of its own. Models that ask whether they are being recorded (transformers builds other attention
        masks then, which take other kernels) are told so already. Random numbers drawn here are given back.
        """
        drawn, asked = torch.cuda.get_rng_state(), torch.cuda.is_current_stream_capturing
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        torch.cuda.is_current_stream_capturing = lambda: True
        try:
            with torch.cuda.stream(aside):
                yield
        finally:
            torch.cuda.is_current_stream_capturing = asked
            torch.cuda.current_stream().wait_stream(aside)
            torch.cuda.set_rng_state(drawn)

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
