"""Once per logical step: weights in, the subspace and masks of every slot out. Reads weights, never data."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from lsg.distributed.group import Group
from lsg.methods import Method
from lsg.parameters.garbage import without_garbage_collection
from lsg.parameters.sharded_matrix_chunks import gathered
from lsg.parameters.slot import Slot
from lsg.parameters.stack import Stack
from lsg.subspace.decompose import gaussian
from lsg.subspace.importance import top_indices

_MOST_STREAMS = 4  # the matrix library keeps a workspace of some 32 MiB for each


class Refresh:
    """Gives slots their subspaces and masks. With `cuda_graph` its kernels are recorded once and then replayed."""

    def __init__(
        self,
        stacks: Sequence[Stack],
        slots: Sequence[Slot],
        method: Method,
        generator: torch.Generator,
        *,
        cuda_graph: bool = False,
        group: Group | None = None,
    ) -> None:
        """group: the ranks that sharded weights are on."""
        self._group = group or Group()
        self._stacks, self._slots, self._method, self._generator = stacks, slots, method, generator
        self._wants_graph = cuda_graph and bool(stacks)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_is_for: tuple[Any, ...] = ()
        self._replayed = True  # whether the last recording was replayed at least once
        self._last: tuple[Any, ...] = ()  # what the last refresh was for
        self._streams: list[torch.cuda.Stream] | None = None  # there are few, and libraries keep memory for each

    def __call__(self, step: int) -> bool:
        """Subspaces for this logical step. Returns whether they moved in memory (a replay fills the old ones)."""
        sparsity = self._method.sparsity_at(step)
        if self._wants_graph:
            # Weights that were moved (`parameter.data = ...`) leave memory to which anything may be written, data too.
            is_for = sparsity, *(slot.value.data_ptr() for slot in self._slots)
            if self._graph is not None and self._graph_is_for == is_for:
                self._graph.replay()
                self._replayed = True
                return False
            if self._replayed or self._last == is_for:
                self._record(sparsity)
                self._graph_is_for, self._replayed = is_for, False
            else:  # a schedule that changes the sparsity at each step: recordings would not be replayed
                self._run(sparsity)
            self._last = is_for
        else:
            self._run(sparsity)
        return bool(self._stacks)

    @torch.no_grad()
    def _run(self, sparsity: float, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        with torch.autocast(self._generator.device.type, enabled=False):  # a forward under autocast may ask for this
            with _side_by_side(streams) as places:
                for stack, place in zip(self._stacks, places, strict=False):
                    with place:
                        stack.refresh(self._method, sparsity, self._generator)
            for slot in self._slots:
                if slot.maskable:
                    slot.elements_kept = _kept_elements(slot, self._method, sparsity, self._generator, self._group)

    def _record(self, sparsity: float) -> None:
        """Record the kernels of this sparsity; what they write to is what the slots read from then on."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        before = self._generator.get_state()
        if self._streams is None:
            self._streams = [torch.cuda.Stream() for _ in range(1 + min(len(self._stacks), _MOST_STREAMS))]
        aside, *streams = self._streams
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._run(sparsity, streams)  # libraries set up their workspaces for the streams that are recorded
        torch.cuda.current_stream().wait_stream(aside)
        with without_garbage_collection(), torch.cuda.graph(graph, stream=aside):
            self._run(sparsity, streams)
        self._generator.set_state(before)  # as if nothing had been drawn yet: the same subspaces as without recording
        graph.replay()
        self._graph = graph


@contextmanager
def _side_by_side(streams: Sequence[torch.cuda.Stream]) -> Iterator[Iterator[AbstractContextManager[Any]]]:
    """Places to work at: the streams in turn, for work that does not depend on each other; here where there are none.

    A stack's refresh is a chain of small kernels, which leave most of the chip to other stacks'.
    """
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    try:
        yield cycle([torch.cuda.stream(stream) for stream in streams] or [nullcontext()])
    finally:  # a recording that leaves streams apart fails to end, which would hide what went wrong in it
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)


def _kept_elements(
    slot: Slot, method: Method, sparsity: float, generator: torch.Generator, group: Group
) -> Tensor | None:
    # A sharded weight is gathered for it, one at a time: each sample's gradient of it is as large.
    scores = gathered(slot, group).abs().flatten()
    if method.importance == "random":
        scores = gaussian(tuple(scores.shape), scores.float(), generator)
    return top_indices(scores, sparsity)
