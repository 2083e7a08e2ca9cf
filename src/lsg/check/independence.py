"""The check that samples stay apart, and that a model computes with its rules what it computes without them.

It runs before the first batch of each kind is trained on (`Recorder` knows which kinds it has seen), on a few records:

1. Without rules, with one record changed at a time (`ownership.py`): where are the samples in what goes into and comes
   out of each layer? A tensor whose entries belong to several samples is refused, and so is one that changes with the
   number of samples. At the weights as they are, and at weights moved at random: a gate at zero hides nothing.
2. With rules, which are told where: each layer and the model return what they returned without.
3. Backwards: a sample's gradients stay the same when all other samples, and the gradients that arrive at their
   outputs, are others.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lsg.check.agreement import Agreement
from lsg.check.escapes import Escapes, used_outside
from lsg.check.kept_state import changed_state, put_back
from lsg.check.look import ADVICE, Expected, Look, NeedsRule
from lsg.check.loss_check import check_loss
from lsg.check.ownership import Decisions, Recording, alike
from lsg.check.quiet import eagerly, moved_parameters, without_dropout
from lsg.check.records import FewRecords
from lsg.errors import LsgError, PrivacyError, first_line, is_out_of_memory
from lsg.layers.fallback import fallback_forward
from lsg.layers.patched_module import Batch, KnownCalls, PatchedModule
from lsg.losses import Reduction
from lsg.parameters.slot import Slot, refresh_casts

_FEW = 3  # of two samples a batch norm would make plus and minus one, whatever they are
_SLOW = 1.0  # seconds from which on the check says what it does
_OTHER_SEED = 30  # the number of a run with other random numbers
# The first numbers drawn from one are small, from the other large: a branch at random is taken once, and once not.
_LOW, _HIGH = 1902, 1710
_MORE = 8  # half of the additional runs of small models
_SMALL = 20, 2**20  # calls of layers in a forward, and numbers that go into them
_RUNS = 16  # about as many forwards of a few records as the check takes


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
        self._model, self._forward, self._slots, self._batch = model, forward, slots, batch
        self._modules, self._patched_modules = patched_modules, [patched for _, patched in patched_modules]
        self._loss_reduction: Reduction = loss_reduction
        self._devices = sorted({slot.parameter.device.index for slot in slots if slot.parameter.device.type == "cuda"})
        self._told, self._seed = False, _LOW
        self._draws = False  # whether a run has drawn random numbers
        self._dropout: without_dropout | None = None
        self.expected: Expected | None = None
        self.keeps_state = False

    def __call__(self, size: int, inputs: tuple[Any, Any], known: dict[PatchedModule, KnownCalls]) -> bool:
        """Raise PrivacyError, naming the first place where samples have been mixed, if there is one. Otherwise add what
        was learnt to `known`. Returns whether there were two intact samples at every place."""
        for is_eager, few in self._selections(size, inputs):
            with self._quietly(is_eager):
                try:
                    look = self._look(few, closely=False)
                    look.refuse(self._is_random)
                    self._check_loss(look, size, inputs)
                    return self._judge(look, size, known)
                except PrivacyError:
                    raise
                except Exception as error:  # too few records for it, say
                    failure = error
        self._run_as_it_is(inputs)  # raises the model's own error, if it has one
        if is_out_of_memory(failure):
            raise failure
        raise PrivacyError(
            f"the model fails on a few records of a batch, some of them changed ({first_line(failure)}), so that lsg "
            "cannot see whether samples stay apart: let the model take any record of its inputs' shape and "
            "range, and any number of them"
        ) from failure

    def _run_as_it_is(self, inputs: tuple[Any, Any]) -> None:
        """The whole batch, without rules."""
        self._batch.watch = lambda module, patched, args, kwargs: patched.own_forward(*args, **kwargs)
        try:
            with self._quietly(True):
                self._run(inputs)
        finally:
            self._batch.watch = None

    def _selections(self, size: int, inputs: tuple[Any, Any]) -> Iterator[tuple[bool, FewRecords]]:
        """Ways to run the model, the cheapest first. A few models insist on their batch, or on a compiler."""
        for is_eager in (True, False):
            few = _FEW if size != _FEW else _FEW + 1  # what samples share must not have as many rows as there are few
            yield is_eager, FewRecords(inputs, size, few)
            yield is_eager, FewRecords(inputs, size, few, first_alone=True)
            yield is_eager, FewRecords(inputs, size, size)

    @contextmanager
    def _quietly(self, is_eager: bool) -> Iterator[None]:
        """Nothing that a run here does is left behind: random numbers, what a model keeps, calls of weights."""
        with ExitStack() as stack:
            if is_eager:
                stack.enter_context(eagerly())
                self._dropout = stack.enter_context(without_dropout())  # of which a compiler knows nothing
            stack.enter_context(torch.random.fork_rng(devices=self._devices))
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())
            stack.enter_context(torch.enable_grad())
            # To try all of cuDNN's algorithms for a few records takes longer than the check.
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = False
            stack.enter_context(put_back(self._model))
            yield

    def _run(self, inputs: tuple[Any, Any], seed: int | None = None) -> Any:
        """One forward, with the same random numbers as any other of that seed."""
        seed = self._seed if seed is None else seed
        for patched in self._patched_modules:
            patched.restart()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = self._random_states()
        began = time.perf_counter()
        args, kwargs = inputs
        output = self._forward(*args, **kwargs)
        self._tell((time.perf_counter() - began) * _RUNS)
        self._draws = self._draws or self._random_states() != before
        return output

    def _random_states(self) -> list[Any]:
        """Others after a random number was drawn."""
        devices = [torch.cuda.get_rng_state(device).numpy().tobytes() for device in self._devices]
        state = np.random.get_state(legacy=False)
        position, words = state["state"]["pos"], state["state"]["key"].tobytes()
        return [torch.get_rng_state().numpy().tobytes(), random.getstate(), position, words, *devices]

    def _tell(self, seconds: float) -> None:
        if seconds > _SLOW and not self._told:
            self._told = True
            print(
                f"lsg: checking on a few records that samples stay apart, once before the first batch of its kind "
                f"(about {seconds:.0f} s)",
                file=sys.stderr,
            )

    # -- without rules -----------------------------------------------------------------------------------------------
    def _look(self, few: FewRecords, *, closely: bool = True) -> Look:
        """closely: change each record by itself; otherwise one, and then all others."""
        self._seed = _HIGH if closely else _LOW
        runs: list[set[int]] = [{i} for i in range(few.count if closely else 1)]
        if few.count > 2 * _FEW:  # each two of many samples are on different sides once
            bits = range((few.count - 1).bit_length())
            runs = [{i for i in range(few.count) if (i >> bit) % 2 == side} for bit in bits for side in (0, 1)]
        base = Recording()
        with Escapes(self._model, self._modules) as escapes:
            kept = self._record(base, few.batch())
        self.keeps_state |= bool(kept)
        self._refuse_kept_apart(kept)
        if escapes.found:
            raise NeedsRule(escapes.found, used_outside(escapes.name()))
        for number, changed in enumerate(runs):
            now_kept = self._again(base, few, number, changed)
            self._refuse_kept(kept, now_kept, few)
        if not closely:
            if few.count <= 2 * _FEW and _is_small(base):
                self._look_further(base, few, runs)
            # All but one, which becomes the longest, the only one of its kind, or what else there is among others.
            for others, version in ((range(1, few.count), 1), (range(few.count - 1), 1), (range(1, few.count), 2)):
                runs.append(set(others))
                self._again(base, few, len(runs) - 1, runs[-1], version)
            if few.can_break:
                runs.append({0})
                self._again(base, few, len(runs) - 1, runs[-1], broken=True)
        fewer = few.count - 1 if _FEW <= few.count <= _FEW + 1 else None
        if fewer is not None:
            try:
                self._record(Recording(base, None), few.batch(count=fewer))
            except Exception:
                fewer = None
        owners = [sum(1 << number for number, run in enumerate(runs) if i in run) for i in range(few.count)]
        return Look(few, base, owners, fewer)

    def _look_further(self, base: Recording, few: FewRecords, runs: list[set[int]]) -> None:
        """Where a forward costs next to nothing: many more changes, of any of the records. Never by the clock: what is
        refused must not depend on how busy a machine is."""
        draw = random.Random(_LOW)
        for version in (*range(0, 4 * _MORE, 4), *range(_MORE)):  # other values, then also empty and short records
            changed = {i for i in range(few.count) if draw.random() < 0.5}
            runs.append(changed)
            self._again(base, few, len(runs) - 1, changed, version)

    def _again(
        self,
        base: Recording,
        few: FewRecords,
        number: int,
        changed: set[int],
        version: int | None = None,
        *,
        broken: bool = False,
    ) -> dict[str, Any]:
        """A run with records changed. It must call the same layers. The model may refuse records that are empty, all
        alike or NaN; what it computed before it did so counts."""
        version = number if version is None else version
        inputs = few.batch(changed, version=version, broken=broken)
        recording = Recording(base, number, changed, few.count)
        try:
            kept = self._record(recording, inputs)
        except LsgError:
            raise
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error) or not (broken or version % 4):
                raise
            return {}
        if recording.differs is not None and not self._differs_anyway(base, inputs):
            raise PrivacyError(
                f"samples of a batch influence each other before layer '{recording.differs.name}': whether and how it "
                f"is called depends on values of the records. {ADVICE[0].upper()}{ADVICE[1:]}"
            )
        return kept

    def _differs_anyway(self, base: Recording, inputs: tuple[Any, Any]) -> bool:
        """Whether random numbers decide which layers are called."""
        again = Recording(base, _OTHER_SEED)
        self._record(again, inputs, seed=1)
        other = Recording(base, _OTHER_SEED)
        self._record(other, inputs, seed=2)
        return again.differs is not other.differs

    def _record(self, recording: Recording, inputs: tuple[Any, Any], seed: int | None = None) -> dict[str, Any]:
        """Returns what the model keeps of the run."""
        self._batch.watch = recording
        try:
            with put_back(self._model), changed_state(self._model) as kept:
                with Decisions(recording.decide):
                    output = self._run(inputs, seed)
                recording.finish(output)
        finally:
            self._batch.watch = None
            recording.settle()  # also what a forward that failed has shown
        return kept

    def _refuse_kept_apart(self, kept: dict[str, Any]) -> None:
        """What a module computes sample by sample is of no use outside of it."""
        paths = {id(module): path for path, module in self._model.named_modules()}
        apart = [paths.get(id(module), "") for module, patched in self._modules if patched.rule is fallback_forward]
        for name, value in kept.items():
            owner = name.rpartition(".")[0]
            inside = any(not path or owner == path or owner.startswith(path + ".") for path in apart)
            if isinstance(value, Tensor) and inside:
                raise PrivacyError(
                    f"module '{owner or type(self._model).__name__}' keeps a tensor that it computes, '{name}', and "
                    "runs sample by sample, as it uses parameters of its own: return the tensor, or freeze those"
                )

    def _refuse_kept(self, kept: dict[str, Any], now: dict[str, Any], few: FewRecords) -> None:
        """A model must not keep what it computed from records: a buffer is published with the weights, and whatever is
        read at the next batch ties records to each other."""
        published = {name for name, _ in (*self._model.named_buffers(), *self._model.named_parameters())}
        for name in sorted(kept.keys() & now.keys(), key=lambda name: name not in published):
            a, b = kept[name], now[name]
            same = alike(a, b) if isinstance(a, Tensor) else a == b
            if not same and (name in published or self._remembers(few)):
                raise PrivacyError(
                    f"the model keeps '{name}', computed from the records of a batch, beyond it: a state_dict "
                    "publishes buffers without noise, and what is read at the next batch ties records to each other. "
                    "Keep no statistics of data in a forward (lsg.fix(model) turns off those of norm layers)"
                )

    def _remembers(self, few: FewRecords) -> bool:
        """Whether a forward is another one after other records."""
        found = []
        for changed in ((), (0,)):
            with put_back(self._model):
                self._batch.watch = recording = Recording()
                try:
                    self._run(few.batch(changed))
                    recording = self._batch.watch = Recording()
                    recording.finish(self._run(few.batch()))
                finally:
                    self._batch.watch = None
            found.append(recording.places)
        first, second = ([place.trail.value for place in places] for places in found)
        return len(first) != len(second) or any(not alike(a, b) for a, b in zip(first, second, strict=True))

    def _check_loss(self, look: Look, size: int, inputs: tuple[Any, Any]) -> None:
        """One that the model returns must be a mean or a sum over records."""
        if any(trail.trains and trail.value.numel() == 1 for trail in look.base.output):
            self._batch.watch = lambda module, patched, args, kwargs: patched.own_forward(*args, **kwargs)
            try:
                with put_back(self._model):
                    check_loss(self._model, self._forward, inputs, size, self._loss_reduction)
            finally:
                self._batch.watch = None

    # -- judgement ---------------------------------------------------------------------------------------------------
    def _judge(self, as_is: Look, size: int, known: dict[PatchedModule, KnownCalls]) -> bool:
        looks = [as_is]
        try:
            with moved_parameters([slot.parameter for slot in self._slots]):
                refresh_casts(self._slots)
                moved = self._look_again(as_is.few)
                self._seed = _LOW if moved is None else _HIGH
                if moved is not None:
                    moved.refuse(self._is_random)
                    looks.append(moved)
                Agreement(self._model, self._run, self._patched_modules, self._slots, self._batch).check(
                    looks[-1], self._is_random
                )
        finally:
            refresh_casts(self._slots)
        for look in looks:
            look.learn(known, size)
        if self._dropout is not None and not self._dropout.used and not self._draws:
            self.expected = as_is.expected()
        return all(look.intact() >= 2 for look in looks)

    def _look_again(self, few: FewRecords) -> Look | None:
        """None for a model that insists on its weights."""
        try:
            return self._look(few)
        except PrivacyError:
            raise
        except Exception:
            return None

    def _is_random(self, look: Look, where: str) -> bool:
        """Whether a place has other values with other random numbers, and the same records."""
        if not self._draws:
            return False
        for seed in (1, _LOW, _HIGH):
            self._record(Recording(look.base, _OTHER_SEED), look.few.batch(), seed=seed)
        bits = [trail.changed_by for name, trail, *_ in look.base.places if name == where]
        return any(changed is not None and bool((changed & (1 << _OTHER_SEED)).any()) for changed in bits)


def _is_small(forward: Recording) -> bool:
    calls, numbers = _SMALL
    return len(forward.calls) <= calls and sum(place.trail.value.numel() for place in forward.places) <= numbers
