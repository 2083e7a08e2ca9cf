"""One run of a model's forward and backward on carriers of its own: inputs in, outputs and per-sample gradients out.

A tape records such a run, and replays are compared with one.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lsg.parameters.factored_calls import Calls
from lsg.parameters.slot import Recordable, calls_apart
from lsg.speed.transformers_masks import without_needless_masks

CONSTANT = bool | int | float | str | torch.dtype | torch.device | None  # values that cannot change
A_TENSOR = object()  # stands for a tensor in the structure that a model returned


@dataclass(frozen=True)
class NotRecorded:
    """Stands for an object that a model returned, such as transformers' cache of keys and values, and raises when used.

    A replay would return the object of the batch that was recorded.
    """

    _kind: str

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model returned a {self._kind} here, which a recorded forward does not: use PerfConfig("
            f"cuda_graphs=False) if you need it ('{name}' was asked for)"
        )


class Trial:
    """Runs the model, and afterwards knows the structure of what it returned and which carriers got gradients."""

    def __init__(self, forward: Callable[..., Any], slots: Sequence[Recordable]) -> None:
        self._forward, self._slots = forward, slots
        self._live: list[Tensor] = []  # outputs with their autograd graph, kept until the backward
        self._carriers: list[Tensor] = []  # the carriers in use, kept until the backward
        self._calls: list[Calls] = []  # the calls of each slot, kept until the backward
        self.out_structure: Any = None
        self.out_leaves: list[Any] = []
        self.reached: list[int] = []  # which carriers get a gradient
        self.called: list[tuple[Recordable, bool]] = []  # calls that get a gradient: slot, weight is (in, out)

    def forward(self, inputs: list[Any], structure: Any) -> list[Tensor]:
        """Runs the forward and returns the tensors that the model returned."""
        args, kwargs = pytree.tree_unflatten(inputs, structure)
        with ExitStack() as stack:
            self._calls = stack.enter_context(calls_apart(self._slots))
            # The carriers are new ones. A loss that is still held ties the old ones to the stream of its forward, and a
            # recording must not touch another stream.
            self._carriers = [leaf for slot in self._slots for leaf in stack.enter_context(slot.apart())]
            stack.enter_context(without_needless_masks())
            out = self._forward(*args, **kwargs)
        leaves, self.out_structure = pytree.tree_flatten(out)
        self.out_leaves = [_kept(leaf) for leaf in leaves]
        self._live = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return [leaf.detach() for leaf in self._live]

    def backward(self, output_gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns gradients of the carriers reached, gradients of the calls' outputs, then the calls' inputs."""
        pairs = [(o, g) for o, g in zip(self._live, output_gradients, strict=True) if o.requires_grad]
        outputs, gradients = zip(*pairs, strict=True)
        carriers = self._carriers
        by_slot = zip(self._slots, self._calls, strict=True)
        made = [(slot, carrier, calls) for slot, calls in by_slot for carrier in calls.made or ()]
        with torch.autocast(outputs[0].device.type, enabled=False):  # as a backward outside of autocast's block
            wanted = [*carriers, *(carrier for _, carrier, _ in made)]
            found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        self.reached = [i for i, gradient in enumerate(found[: len(carriers)]) if gradient is not None]
        called = [call for call, gradient in zip(made, found[len(carriers) :], strict=True) if gradient is not None]
        inputs = [calls.inputs[carrier] for _, carrier, calls in called]
        self.called = [(slot, i.stored_inputs_first) for (slot, _, _), i in zip(called, inputs, strict=True)]
        if not self.reached and not self.called:
            raise RuntimeError("no trained parameter is reached")
        return [*_apart(gradient for gradient in found if gradient is not None), *(i.x for i in inputs)]

    def let_go(self) -> None:
        """Drop the autograd graph."""
        self._live, self._carriers, self._calls = [], [], []

    def output_names(self) -> list[str]:
        return [f"tensor {number + 1} that the model returns" for number in range(len(self._live))]

    def gradient_names(self) -> list[str]:
        """The names of the tensors that `backward` returned."""
        of_carriers = [slot.name for slot in self._slots for _ in slot.carriers]
        of_calls = [slot.name for slot, _ in self.called]
        names = [*(of_carriers[i] for i in self.reached), *of_calls, *of_calls]
        return [f"the gradient of '{name}'" for name in names]


@contextmanager
def without_trace(buffers: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Restores buffers and random states (Python's too) at the end, and empties autocast's cache before and after."""
    before = [buffer.clone() for buffer in buffers]
    python, of_numpy = random.getstate(), np.random.get_state()
    torch.clear_autocast_cache()  # a cast made earlier would lie outside of the recording
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        torch.clear_autocast_cache()
        random.setstate(python)
        np.random.set_state(of_numpy)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _kept(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return A_TENSOR
    return leaf if isinstance(leaf, CONSTANT) else NotRecorded(type(leaf).__name__)


def _apart(gradients: Iterable[Tensor]) -> Iterator[Tensor]:
    """Gives each gradient memory of its own: autograd may return one tensor for two leaves, and each changes later."""
    seen: set[int] = set()
    for gradient in gradients:
        yield gradient.clone() if gradient.data_ptr() in seen else gradient
        seen.add(gradient.data_ptr())
