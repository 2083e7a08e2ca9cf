"""One recording of a model's forward and backward at one shape. Its inputs, outputs and gradients have fixed memory."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lsg.errors import PrivacyError
from lsg.layers.autograd_functions import fixed_signature
from lsg.parameters.factored_calls import Call
from lsg.parameters.garbage import without_garbage_collection
from lsg.parameters.slot import Recordable
from lsg.speed.comparison import first_difference, probe_like, tolerance
from lsg.speed.outside_reads import Attribute, outside_reads
from lsg.speed.tape import Tape
from lsg.speed.trial import A_TENSOR, Trial, without_trace


class Pass:
    """Stands for one replayed forward. Autograd alone holds it, so it vanishes when no backward can come any more."""

    def __init__(self) -> None:
        self.done = False


class Recording:
    """Recorded by `record`, compared with a plain run by `difference`, used by `replay`."""

    def __init__(
        self,
        forward: Callable[..., Any],
        leaves: list[Any],
        structure: Any,
        slots: Sequence[Recordable],
        model: nn.Module,
    ) -> None:
        self._forward, self._structure, self._slots, self._model = forward, structure, slots, model
        self._device = slots[0].parameter.device
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._trial = Trial(forward, slots)
        self._attributes: list[Attribute] = []  # tensors of modules that the forward reads

    def record(self, tape: Tape) -> str | None:
        """Records forward and backward, or returns the reason why this model must not be recorded."""
        buffers, trial = list(self._model.buffers()), self._trial
        try:
            with without_trace(buffers, self._device):
                self._attributes, others = outside_reads(
                    lambda: trial.forward(self._inputs, self._structure), self._model, self._inputs, self._slots
                )
                trial.let_go()
                if others:
                    return (
                        f"the model's forward reads a tensor of shape {tuple(others[0].shape)} that is neither its "
                        "input nor a parameter nor a buffer: pass it as an input, or register it as a buffer"
                    )
                with tape.rehearsal():
                    outputs = trial.forward(self._inputs, self._structure)
                    self._output_gradients = [torch.zeros_like(output) for output in outputs]
                    trial.backward(self._output_gradients)
                trial.let_go()
                torch.clear_autocast_cache()
                with without_garbage_collection():
                    self._outputs, self._run_forward = tape.record(lambda: trial.forward(self._inputs, self._structure))
                    self._gradients, self._run_backward = tape.record(lambda: trial.backward(self._output_gradients))
        finally:
            trial.let_go()
        return None

    def moved(self) -> Attribute | None:
        """The first attribute that is no longer in the memory that the recording reads; None if all are."""
        return next((attribute for attribute in self._attributes if not attribute.is_in_place()), None)

    def difference(self, leaves: list[Any], tape: Tape) -> str | None:
        """Replays these inputs and runs them plainly, from the same random state. Returns what differs, or None.

        Neither run changes buffers or random states.
        """
        buffers = list(self._model.buffers())
        with torch.no_grad():
            for mine in self._output_gradients:
                mine.copy_(probe_like(mine))
        self._take(leaves)
        with without_trace(buffers, self._device):
            self._run_forward()
            self._run_backward()
        self._take(leaves)
        plain = Trial(self._forward, self._slots)
        try:
            with without_trace(buffers, self._device), tape.as_recorded():
                outputs = plain.forward(self._inputs, self._structure)
                output_names = plain.output_names()
                if (plain.out_structure, plain.out_leaves) != (self._trial.out_structure, self._trial.out_leaves):
                    return "the model returns something else"
                gradients = plain.backward(self._output_gradients)
        finally:
            plain.let_go()
        if (plain.reached, plain.called) != (self._trial.reached, self._trial.called):
            return "other parameters are reached"
        dtypes = {tensor.dtype for tensor in (*outputs, *(slot.parameter for slot in self._slots))}
        within = tolerance(self._device.type, dtypes)
        return first_difference(output_names, self._outputs, outputs, within) or first_difference(
            plain.gradient_names(), self._gradients, gradients, within
        )

    def _take(self, leaves: list[Any]) -> None:
        for mine, given in zip(self._inputs, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)

    def replay(self, leaves: list[Any]) -> tuple[Any, Pass]:
        """Returns what the model returns for these inputs. A backward through it runs the recorded one."""
        self._take(leaves)
        self._run_forward()
        this_pass = Pass()
        carriers = [carrier for slot in self._slots for carrier in slot.carriers]
        reached = [carriers[i] for i in self._trial.reached]
        calls = [_begin(*call, g) for call, g in zip(self._trial.called, self._of_calls(), strict=True)]
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        copies = iter(_Replay.apply(anchor, self, this_pass, reached, calls, *self._outputs))
        out = [next(copies) if leaf is A_TENSOR else leaf for leaf in self._trial.out_leaves]
        return pytree.tree_unflatten(out, self._trial.out_structure), this_pass

    def _of_calls(self) -> list[Tensor]:
        """The recorded gradients of the calls' outputs."""
        return self._gradients[len(self._trial.reached) :][: len(self._trial.called)]

    def backward(self, gradients: Sequence[Tensor], reached: Sequence[Tensor], calls: Sequence[Call]) -> None:
        """Writes per-sample gradients into carriers, dense weights' factors into calls. gradients: of the outputs."""
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
        recording: Recording,
        this_pass: Pass,
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


def _begin(slot: Recordable, stored_inputs_first: bool, like: Tensor) -> Call:
    """Begins a call of the slot in this logical step, whose output has the shape and type of `like`."""
    return slot.calls.begin(tuple(like.shape), like.dtype, like.device, stored_inputs_first=stored_inputs_first)
