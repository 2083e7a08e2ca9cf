"""Attaches a recorder to a model, until `detach`: what happens before and after each of the model's forwards.

A forward of the model goes through `RootForward`: `begin` (the recorder makes subspaces and carriers; the check, if the
forward is of a new kind), the model's own forward with its layers' rules, `end`. What is called does not call back.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lsg.check.outside_uses import used_outside
from lsg.distributed.sharded_model import ShardedModel
from lsg.errors import PrivacyError
from lsg.files.foreign_text import say
from lsg.layers.embedding_bag import EMBEDDING_BAG, refuse_offsets
from lsg.layers.install import patch_of
from lsg.layers.instance_methods import register_patch, swap_in, swap_out
from lsg.layers.parameter_treatments import Treatments
from lsg.layers.patched_module import Batch
from lsg.losses import Reduction
from lsg.model.checked_forwards import CheckedForwards
from lsg.model.inputs import batch_size, refuse_results
from lsg.model.module_rules import ModuleRules
from lsg.model.recorder import Recorder
from lsg.model.root_forward import CallWhileAlive, RootForward
from lsg.parameters.slot import Slot
from lsg.perf import PerfConfig
from lsg.speed.compile_choice import COMPILING, CompileChoice
from lsg.speed.fast_forward import FastForward, pad_rows
from lsg.speed.tape import CudaTape


class Attachment:
    """The rules on a model's modules, its replaced forward, and its hooks."""

    def __init__(
        self,
        model: nn.Module,
        treatments: Treatments,
        recorder: Recorder,
        perf: PerfConfig,
        loss_reduction: Reduction = "mean",
        sharded: ShardedModel | None = None,
    ) -> None:
        self._sharded = sharded
        self.model, self.recorder = model, recorder
        self.batch: Batch = recorder.batch
        device = recorder.generator.device.type
        self._rules = ModuleRules(model, treatments, recorder.slots, self.batch, kernels=device == "cuda")
        self.fast: FastForward | None = None
        if perf.fast(device) and not patch_of(model):  # a model that is one layer is too small to matter
            tape = CudaTape() if perf.graphs(device) else None
            slots = list(recorder.slots.values())
            self.fast = FastForward(model, slots, compiled=perf.compiles, tape=tape, before_run=self._rules.restart)
        self._may_compile = perf.compile is None
        self._choice: CompileChoice | None = None
        self._moves_seen = 0
        self._root = RootForward(model, self)
        self._checked = CheckedForwards(model, self._rules, recorder, self._root, self.fast, loss_reduction, sharded)
        self._own_zero_grad = swap_in(model, "zero_grad", _zero_grad)
        model.__dict__["_lsg_clear"] = CallWhileAlive(recorder.clear)
        self._handles = [
            *(s.parameter.register_post_accumulate_grad_hook(_refuse_escape(s)) for s in recorder.slots.values()),
            *(p.register_post_accumulate_grad_hook(_refuse_escape(s)) for s, p in self._gathered()),
            *(m.register_forward_pre_hook(_refuse_packed) for m in model.modules() if hasattr(m, "new_to_old")),
            *(
                m.register_forward_pre_hook(_refuse_offsets, with_kwargs=True)
                for m in model.modules()
                if isinstance(m, nn.EmbeddingBag)
            ),
        ]

    def _gathered(self) -> list[tuple[Slot, nn.Parameter]]:
        """What FSDP2 puts into modules in place of sharded parameters, and where gradients would arrive."""
        slots = [] if self._sharded is None else self.recorder.slots.values()
        found = [(slot, self._sharded.gathered(slot.parameter)) for slot in slots if self._sharded is not None]
        return [(slot, parameter) for slot, parameter in found if parameter is not None]

    def detach(self) -> None:
        """Leave the model as it was found."""
        for handle in self._handles:
            handle.remove()
        self._root.remove()
        if self.fast is not None:
            self.fast.remove()
        swap_out(self.model, "zero_grad", self._own_zero_grad)
        del self.model.__dict__["_lsg_clear"]
        self._rules.remove()

    # -- what the root forward tells (ForwardEvents) -----------------------------------------------------------------
    @property
    def keeps_state(self) -> bool:
        return self._checked.keeps_state

    def begin(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """A forward of the model begins: carriers for its samples, and the check if there was none of its kind."""
        size = batch_size(inputs)
        if size is None and self.batch.size is None:
            raise PrivacyError(
                "the model's inputs hold no tensor with a row for each record, so samples cannot be told apart: give "
                "it tensors, in tuples, lists, dictionaries or dataclasses"
            )
        if size is not None:
            self._choose_compilation()
            refuse_results(inputs, (c for slot in self.recorder.slots.values() for c in slot.carriers))
            # The first forward of a logical step makes its subspaces: only here are the weights sure to be those that
            # the step starts from (an optimizer, a schedule or the user may change them after the last step).
            self.recorder.prepare(size)
            assert self.batch.size is not None
            if self.batch.size > size:
                inputs = pad_rows(inputs, size, self.batch.size)
        self._discard_recordings_of_moved_subspaces()
        self._rules.begin(self._checked.known_calls(inputs))
        return inputs

    def end(self, output: Any) -> None:
        """The forward is over."""
        self._checked.refuse_others(output)

    def check(self, inputs: tuple[Any, Any]) -> None:
        """Look at the model with these inputs, of which something is new."""
        if self._sharded is not None:
            raise PrivacyError(
                "a layer is called in a way that the check before this forward has not seen, and the weights are "
                "sharded, so that this rank cannot look at the model alone while others compute: let the model call "
                "its layers alike for all batches, or train it without fully_shard"
            )
        self._checked.check(inputs)

    def expect_steps(self, steps: int) -> None:
        """Takes the planned number of logical steps, so that the first ones can show whether compiling pays."""
        if self.fast is not None and self._may_compile:
            on_gpu = self.recorder.generator.device.type == "cuda"
            self._choice = CompileChoice(steps, torch.cuda.synchronize if on_gpu else lambda: None)

    def _choose_compilation(self) -> None:
        step = self.recorder.subspaces.step
        saved = None if self._choice is None else self._choice.step_begins(step)
        if saved is None or self.fast is None or not self.fast.records:
            return
        say(
            f"lsg: compiling the model, which takes about {COMPILING:.0f} s and saves about {saved:.0f} s of what is "
            "left (engine.compile_seconds has its time; PerfConfig(compile=False) keeps lsg from it)",
        )
        self.fast.choose_compiled()

    def stop_padding(self) -> None:
        """Gives the model its batches without padding from now on."""
        self.recorder.stop_padding()

    def _discard_recordings_of_moved_subspaces(self) -> None:
        moves = self.recorder.subspaces.moves
        if self.fast is not None and moves != self._moves_seen:
            self.fast.discard_recordings()
        self._moves_seen = moves


def _zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    """A model's own, which clears per-sample gradients too."""
    self.__dict__["_lsg_clear"]()
    type(self).zero_grad(self, set_to_none)


_zero_grad.__name__ = "zero_grad"
register_patch(_zero_grad, "_lsg_root")


def _refuse_escape(slot: Slot) -> Callable[[Tensor], None]:
    """Rules never differentiate a weight itself, so a gradient that reaches it came past them."""

    name, reference = slot.name, weakref.ref(slot)

    def hook(parameter: Tensor) -> None:
        slot = reference()
        # Compiled graphs call this for weights that get no gradient, too: there is none, or the last step's as it was.
        if parameter.grad is None or (slot is not None and slot.is_released(parameter.grad)):
            return
        parameter.grad = None
        raise PrivacyError(used_outside(name))

    return hook


def _refuse_offsets(bag: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the check runs the bag without its rule, when it looks like a layer that mixes samples."""
    patched = patch_of(bag)
    if patched is not None and patched.rule is EMBEDDING_BAG.forward and torch.is_grad_enabled():
        refuse_offsets(patched.name, *args, **kwargs)


def _refuse_packed(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Opacus's RNNs sort the samples of a packed sequence by length: their rows are not the batch's."""
    if torch.is_grad_enabled() and any(isinstance(argument, PackedSequence) for argument in args):
        raise PrivacyError(
            f"a {type(module).__name__} got a packed sequence, whose rows are sorted by length, so that samples cannot "
            "be told apart: give it the padded one, and leave padding out of the loss or the pooling"
        )
