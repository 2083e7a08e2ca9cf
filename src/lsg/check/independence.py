"""The check that samples stay apart, and that a model computes with its rules what it computes without them.

It runs on a few records, before the first batch of each kind is trained on (`model/checked_forwards.py` knows which
kinds it has seen):

1. Without rules, with one record changed at a time (`ownership.py`): where are the samples in what goes into and comes
   out of each layer? A tensor whose entries belong to several samples is refused, and so is one that changes with the
   number of samples. At the weights as they are, and at weights moved at random: a gate at zero hides nothing.
2. With rules, which are told where: each layer and the model return what they returned without.
3. Backwards: a sample's gradients stay the same when all other samples, and the gradients that arrive at their
   outputs, are others.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from lsg.check.agreement import Agreement
from lsg.check.changed_runs import FEW, Looks
from lsg.check.look import Expected, Look
from lsg.check.loss_check import check_loss
from lsg.check.quiet import moved_parameters
from lsg.check.records import FewRecords
from lsg.check.trial_runs import HIGH, LOW, TrialRuns
from lsg.errors import PrivacyError, first_line, is_out_of_memory
from lsg.layers.patched_module import Batch, KnownCalls, PatchedModule
from lsg.losses import Reduction
from lsg.parameters.slot import Slot, refresh_casts


class Check:
    """What is looked at: a model, how it runs (`forward`, its own), its patched modules and its slots."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        patched_modules: Sequence[tuple[nn.Module, PatchedModule]],
        slots: Sequence[Slot],
        batch: Batch,
        loss_reduction: Reduction = "mean",
    ) -> None:
        self._slots, self._batch, self._loss_reduction = slots, batch, loss_reduction
        self._patched_modules = [patched for _, patched in patched_modules]
        devices = sorted({slot.device.index for slot in slots if slot.device.type == "cuda"})
        self._runs = TrialRuns(model, forward, self._patched_modules, batch, devices)
        self._looks = Looks(self._runs, patched_modules)
        self.expected: Expected | None = None

    @property
    def keeps_state(self) -> bool:
        """Whether the model keeps anything from batch to batch."""
        return self._looks.keeps_state

    def __call__(self, size: int, inputs: tuple[Any, Any], known: dict[PatchedModule, KnownCalls]) -> bool:
        """Raise PrivacyError, naming the first place where samples have been mixed, if there is one. Otherwise add what
        was learnt to `known`. Returns whether there were two intact samples at every place."""
        for is_eager, few in self._selections(size, inputs):
            with self._runs.quietly(is_eager):
                try:
                    look = self._looks.look(few, closely=False)
                    look.refuse(self._looks.is_random)
                    self._check_loss(look, size, inputs)
                    return self._judge(look, size, known)
                except PrivacyError:
                    raise
                except Exception as error:  # too few records for it, say
                    failure = error
        with self._runs.quietly(True), self._runs.without_rules():
            self._runs.run(inputs)  # raises the model's own error, if it has one
        if is_out_of_memory(failure) or self._batch.may_blame_layout:  # then there is another look
            raise failure
        raise PrivacyError(
            f"the model fails on a few records of a batch, some of them changed ({first_line(failure)}), so that lsg "
            "cannot see whether samples stay apart: let the model take any record of its inputs' shape and "
            "range, and any number of them"
        ) from failure

    def _selections(self, size: int, inputs: tuple[Any, Any]) -> Iterator[tuple[bool, FewRecords]]:
        """Ways to run the model, the cheapest first. A few models insist on their batch, or on a compiler."""
        for is_eager in (True, False):
            few = FEW if size != FEW else FEW + 1  # what samples share must not have as many rows as there are few
            yield is_eager, FewRecords(inputs, size, few)
            yield is_eager, FewRecords(inputs, size, few, first_alone=True)
            yield is_eager, FewRecords(inputs, size, size)

    def _check_loss(self, look: Look, size: int, inputs: tuple[Any, Any]) -> None:
        """One that the model returns must be a mean or a sum over records."""
        if any(trail.trains and trail.value.numel() == 1 for trail in look.base.output):
            with self._runs.without_rules():
                check_loss(self._runs.model, self._runs.forward, inputs, size, self._loss_reduction)

    def _judge(self, as_is: Look, size: int, known: dict[PatchedModule, KnownCalls]) -> bool:
        looks = [as_is]
        try:
            with moved_parameters([slot.in_use for slot in self._slots]):
                refresh_casts(self._slots)
                moved = self._look_again(as_is.few)
                self._runs.seed = LOW if moved is None else HIGH
                if moved is not None:
                    moved.refuse(self._looks.is_random)
                    looks.append(moved)
                Agreement(self._runs.model, self._runs.run, self._patched_modules, self._slots, self._batch).check(
                    looks[-1], self._looks.is_random
                )
        finally:
            refresh_casts(self._slots)
        for look in looks:
            look.learn(known, size)
        dropout = self._runs.dropout
        if dropout is not None and not dropout.used and not self._runs.draws:
            self.expected = as_is.expected()
        return all(look.intact() >= 2 for look in looks)

    def _look_again(self, few: FewRecords) -> Look | None:
        """None for a model that insists on its weights."""
        try:
            return self._looks.look(few)
        except PrivacyError:
            raise
        except Exception:
            return None
