"""Recording a private model: its forward and backward are replayed as CUDA graphs, so that the CPU launches nothing.

The first batch of a shape runs as usual, where checks and lazy set-up happen; the second is recorded; from then on the
recording is replayed on the new inputs. Per-sample gradients are written into the same memory each time, which is safe
because they are summed up before the next forward; where they wait for that, or a backward is still to come, the
forward runs as usual. The same holds for the inputs and output gradients that dense weights leave in place of them.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lsg.errors import PrivacyError
from lsg.layers.autograd_functions import fixed_signature
from lsg.parameters.factored_calls import Call, Calls
from lsg.parameters.slot import Recordable, calls_apart
from lsg.speed.transformers_masks import without_needless_masks

_MOST_RECORDINGS = 24  # each keeps a micro-batch's per-sample gradients
_CONSTANT = bool | int | float | str | torch.dtype | torch.device | None  # inputs that are what they are, for good
_A_TENSOR = object()  # stands for one among what a model returned


class Tape(Protocol):
    """Records what a function does with tensors; returns its results and a way to compute them again in place."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Around a run before the recording, in which libraries do what they do once."""

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


class GraphedForward:
    """Calls `forward` the first time that it sees a shape, then a recording of it."""

    def __init__(self, forward: Callable[..., Any], model: nn.Module, slots: Sequence[Recordable], tape: Tape) -> None:
        self._model, self._slots, self._tape = model, slots, tape
        device = slots[0].parameter.device

        def on_the_device(*args: Any, **kwargs: Any) -> Any:
            with device:  # positions made on the fly, say: a copy from the host would end the recording
                return forward(*args, **kwargs)

        self._forward = on_the_device
        self._recordings: dict[Any, _Recording | None] = {}  # None: seen once
        self._recordable = True
        self.recorded = 0
        self._in_flight: weakref.ref[_Pass] | None = None

    def discard_recordings(self) -> None:
        """What recordings read from has moved, so that they are made anew."""
        self._recordings.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._recordable:
            return self._forward(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if not all(isinstance(leaf, Tensor | _CONSTANT) for leaf in leaves):
            return self._forward(*args, **kwargs)  # an object may hold other tensors at the next call
        key = (structure, *map(_signature, leaves), self._surroundings())
        if key not in self._recordings and len(self._recordings) < _MOST_RECORDINGS:
            self._recordings[key] = None
            return self._forward(*args, **kwargs)
        if key not in self._recordings or self._occupied():
            return self._forward(*args, **kwargs)
        recording = self._recordings[key]
        if recording is None:
            recording = _Recording(self._forward, leaves, structure, self._slots, list(self._model.buffers()))
            try:
                recording.record(self._tape)
            except RuntimeError as error:
                self._recordable = False
                reason = str(_first_cause(error)).splitlines()[0]
                warnings.warn(
                    f"cuda_graphs: this model cannot be recorded, so it runs as usual ({reason})", stacklevel=2
                )
                return self._forward(*args, **kwargs)
            self._recordings[key] = recording
            self.recorded += 1
        out, this_pass = recording.replay(leaves)
        self._in_flight = weakref.ref(this_pass)
        return out

    def _surroundings(self) -> tuple[Any, ...]:
        """What else a recording depends on: precision, what is trained, modules' modes, where the weights are."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        modes = tuple(module.training for module in self._model.modules())
        return cast, modes, tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors)

    def _occupied(self) -> bool:
        """Whether a recording's memory is still needed: its backward may come, or its gradients wait to be summed."""
        last = None if self._in_flight is None else self._in_flight()
        return (last is not None and not last.done) or any(slot.pending for slot in self._slots)


class _Pass:
    """One forward of a recording; gone when nothing can call its backward any more."""

    def __init__(self) -> None:
        self.done = False


class _Recording:
    """A forward and its backward at one shape, on inputs, outputs and gradients of its own."""

    def __init__(
        self,
        forward: Callable[..., Any],
        leaves: list[Any],
        structure: Any,
        slots: Sequence[Recordable],
        buffers: Sequence[Tensor],
    ) -> None:
        self._forward, self._structure, self._buffers = forward, structure, buffers
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._slots = slots
        self._live: list[Tensor] = []  # outputs with their autograd graph, between recording forward and backward
        self._reached: list[int] = []  # which carriers get a gradient
        self._leaves: list[Tensor] = []  # the carriers used, between recording forward and backward
        self._calls: list[Calls] = []  # of each slot, likewise
        self._called: list[tuple[Recordable, bool]] = []  # calls that get a gradient: of what, and whether (in, out)

    def record(self, tape: Tape) -> None:
        torch.clear_autocast_cache()  # a cast from before would belong to no recording
        try:
            with _kept(self._buffers), tape.rehearsal():
                self._output_gradients = [torch.zeros_like(output) for output in self._record_forward()]
                self._record_backward()
            torch.clear_autocast_cache()
            self._outputs, self._run_forward = tape.record(self._record_forward)
            self._gradients, self._run_backward = tape.record(self._record_backward)
        finally:
            torch.clear_autocast_cache()
            self._live, self._leaves, self._calls = [], [], []

    def _record_forward(self) -> list[Tensor]:
        args, kwargs = pytree.tree_unflatten(self._inputs, self._structure)
        with ExitStack() as stack:
            self._calls = stack.enter_context(calls_apart(self._slots))
            # New carriers: those of a loss that is still held belong to the stream of its forward, and a recording may
            # not touch another stream.
            self._leaves = [leaf for slot in self._slots for leaf in stack.enter_context(slot.apart())]
            stack.enter_context(without_needless_masks())
            out = self._forward(*args, **kwargs)
        leaves, self._out_structure = pytree.tree_flatten(out)
        self._out_leaves = [_A_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._live = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return [leaf.detach() for leaf in self._live]

    def _record_backward(self) -> list[Tensor]:
        pairs = [(o, g) for o, g in zip(self._live, self._output_gradients, strict=True) if o.requires_grad]
        outputs, gradients = zip(*pairs, strict=True)
        carriers = self._leaves
        by_slot = zip(self._slots, self._calls, strict=True)
        made = [(slot, carrier, calls) for slot, calls in by_slot for carrier in calls.made or ()]
        with torch.autocast(outputs[0].device.type, enabled=False):  # as a backward outside of autocast's block
            wanted = [*carriers, *(carrier for _, carrier, _ in made)]
            found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        self._reached = [i for i, gradient in enumerate(found[: len(carriers)]) if gradient is not None]
        called = [call for call, gradient in zip(made, found[len(carriers) :], strict=True) if gradient is not None]
        inputs = [calls.inputs[carrier] for _, carrier, calls in called]
        self._called = [(slot, i.stored_inputs_first) for (slot, _, _), i in zip(called, inputs, strict=True)]
        if not self._reached and not self._called:
            raise RuntimeError("no trained parameter is reached")
        return [*_apart(gradient for gradient in found if gradient is not None), *(i.x for i in inputs)]

    def _carriers(self) -> list[Tensor]:
        return [carrier for slot in self._slots for carrier in slot.carriers]

    def replay(self, leaves: list[Any]) -> tuple[Any, _Pass]:
        for mine, given in zip(self._inputs, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        self._run_forward()
        this_pass = _Pass()
        carriers = self._carriers()
        reached = [carriers[i] for i in self._reached]
        calls = [_begin(*call, g) for call, g in zip(self._called, self._of_calls(), strict=True)]
        anchor = torch.zeros((), device=self._slots[0].parameter.device, requires_grad=True)
        copies = iter(_Replay.apply(anchor, self, this_pass, reached, calls, *self._outputs))
        out = [next(copies) if leaf is _A_TENSOR else leaf for leaf in self._out_leaves]
        return pytree.tree_unflatten(out, self._out_structure), this_pass

    def _of_calls(self) -> list[Tensor]:
        """Gradients of the calls' outputs."""
        return self._gradients[len(self._reached) :][: len(self._called)]

    def backward(self, gradients: Sequence[Tensor], reached: Sequence[Tensor], calls: Sequence[Call]) -> None:
        """Per-sample gradients of `gradients` (of the outputs) into the carriers, and their factors into the calls."""
        for mine, given in zip(self._output_gradients, gradients, strict=True):
            mine.copy_(given)
        self._run_backward()
        for carrier, gradient in zip(reached, self._gradients, strict=False):
            carrier.grad = gradient if carrier.grad is None else carrier.grad + gradient
        inputs = self._gradients[len(reached) + len(calls) :]
        for call, gradient, x in zip(calls, self._of_calls(), inputs, strict=True):
            call.carrier.grad = gradient
            call.keep(x)


class _Replay(torch.autograd.Function):
    """Ties a replayed forward to its replayed backward. The outputs are copies: the next replay writes over its own."""

    @staticmethod
    @fixed_signature
    def forward(
        ctx: Any,
        anchor: Tensor,
        recording: _Recording,
        this_pass: _Pass,
        reached: list[Tensor],
        calls: list[Call],
        *outputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.recording, ctx.this_pass, ctx.reached, ctx.calls = recording, this_pass, reached, calls
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        if ctx.this_pass.done:
            raise PrivacyError("cuda_graphs: backward was called twice for one forward; set cuda_graphs=False for that")
        ctx.this_pass.done = True
        ctx.recording.backward(gradients, ctx.reached, ctx.calls)
        return (None,) * (5 + len(gradients))


@contextmanager
def _kept(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Running statistics, say, as if nothing had been run here."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _apart(gradients: Iterable[Tensor]) -> Iterator[Tensor]:
    """In memory of their own: autograd may hand out one tensor for two leaves, and each is changed by itself."""
    seen: set[int] = set()
    for gradient in gradients:
        yield gradient.clone() if gradient.data_ptr() in seen else gradient
        seen.add(gradient.data_ptr())


def _begin(slot: Recordable, stored_inputs_first: bool, like: Tensor) -> Call:
    """A call of the present generation, with an output like this."""
    return slot.calls.begin(tuple(like.shape), like.dtype, like.device, stored_inputs_first=stored_inputs_first)


def _first_cause(error: BaseException) -> BaseException:
    """What went wrong inside a recording: ending it fails too then, and less tellingly."""
    return error if error.__context__ is None else _first_cause(error.__context__)


def _signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)  # True is not 1
