"""Looks at a model without its rules: which runs are made, with which records changed."""

import random
from collections.abc import Sequence
from typing import Any

from torch import nn

from lsg.check.kept_refusals import refuse_kept, refuse_kept_apart
from lsg.check.look import ADVICE, Look, NeedsRule
from lsg.check.outside_uses import Escapes, used_outside
from lsg.check.recording import Recording
from lsg.check.records import FewRecords
from lsg.check.trial_runs import HIGH, LOW, TrialRuns
from lsg.errors import LsgError, PrivacyError, is_out_of_memory
from lsg.layers.patched_module import PatchedModule

FEW = 3  # of two samples a batch norm would make plus and minus one, whatever they are
_OTHER_SEED = 30  # the number of a run with other random numbers
_MORE = 8  # half of the additional runs of small models
_SMALL = 20, 2**20  # calls of layers in a forward, and numbers that go into them


class Looks:
    """Takes looks by trial runs. modules: all that have rules."""

    def __init__(self, runs: TrialRuns, modules: Sequence[tuple[nn.Module, PatchedModule]]) -> None:
        self._runs, self._modules = runs, modules
        self.keeps_state = False  # whether the model was seen to keep anything beyond a forward

    def look(self, few: FewRecords, *, closely: bool = True) -> Look:
        """closely: change each record by itself; otherwise one, and then all others."""
        self._runs.seed = HIGH if closely else LOW
        runs: list[set[int]] = [{i} for i in range(few.count if closely else 1)]
        if few.count > 2 * FEW:  # each two of many samples are on different sides once
            bits = range((few.count - 1).bit_length())
            runs = [{i for i in range(few.count) if (i >> bit) % 2 == side} for bit in bits for side in (0, 1)]
        base = Recording()
        with Escapes(self._runs.model, self._modules) as escapes:
            kept = self._runs.record(base, few.batch())
        self.keeps_state |= bool(kept)
        refuse_kept_apart(self._runs.model, self._modules, kept)
        if escapes.found:
            raise NeedsRule(escapes.found, used_outside(escapes.name()))
        # Before those with changes, which are compared by where this one is shorter.
        fewer = few.count - 1 if FEW <= few.count <= FEW + 1 else None
        if fewer is not None:
            try:
                self._runs.record(Recording(base, None), few.batch(count=fewer))
            except Exception:
                fewer = None
        for number, changed in enumerate(runs):
            now_kept = self._again(base, few, number, changed)
            refuse_kept(self._runs, kept, now_kept, few)
        if not closely:
            if few.count <= 2 * FEW and _is_small(base):
                self._look_further(base, few, runs)
            # All but one, which becomes the longest, the only one of its kind, or what else there is among others.
            for others, version in ((range(1, few.count), 1), (range(few.count - 1), 1), (range(1, few.count), 2)):
                runs.append(set(others))
                self._again(base, few, len(runs) - 1, runs[-1], version)
            if few.can_break:
                runs.append({0})
                self._again(base, few, len(runs) - 1, runs[-1], broken=True)
        owners = [sum(1 << number for number, run in enumerate(runs) if i in run) for i in range(few.count)]
        return Look(few, base, owners, fewer)

    def _look_further(self, base: Recording, few: FewRecords, runs: list[set[int]]) -> None:
        """Where a forward costs next to nothing: many more changes, of any of the records. Never by the clock: what is
        refused must not depend on how busy a machine is."""
        draw = random.Random(LOW)
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
            kept = self._runs.record(recording, inputs)
        except LsgError:
            raise
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error) or not (broken or version % 4):
                raise
            # Changed they must be all the same: into records like the batch's own.
            return {} if broken else self._again(base, few, number, changed, 4 * version)
        if recording.differs is not None and not self._differs_anyway(base, inputs):
            raise PrivacyError(
                f"samples of a batch influence each other before layer '{recording.differs.name}': whether and how it "
                f"is called depends on values of the records. {ADVICE[0].upper()}{ADVICE[1:]}"
            )
        return kept

    def _differs_anyway(self, base: Recording, inputs: tuple[Any, Any]) -> bool:
        """Whether random numbers decide which layers are called."""
        again = Recording(base, _OTHER_SEED)
        self._runs.record(again, inputs, seed=1)
        other = Recording(base, _OTHER_SEED)
        self._runs.record(other, inputs, seed=2)
        return again.differs is not other.differs

    def is_random(self, look: Look, where: str) -> bool:
        """Whether a place has other values with other random numbers, and the same records."""
        if not self._runs.draws:
            return False
        for seed in (1, LOW, HIGH):
            self._runs.record(Recording(look.base, _OTHER_SEED), look.few.batch(), seed=seed)
        bits = [trail.changed_by for name, trail, *_ in look.base.places if name == where]
        return any(changed is not None and bool((changed & (1 << _OTHER_SEED)).any()) for changed in bits)


def _is_small(forward: Recording) -> bool:
    calls, numbers = _SMALL
    return len(forward.calls) <= calls and sum(place.trail.value.numel() for place in forward.places) <= numbers
