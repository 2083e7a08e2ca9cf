"""A look at a model without its rules: its recorded forward, and where the samples are at every place of it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lsg.check.ownership import Trail, alike, locate
from lsg.check.recording import Call, Recording
from lsg.check.records import FewRecords
from lsg.errors import PrivacyError
from lsg.layers.patched_module import KnownCalls, PatchedModule
from lsg.layers.samples import COUNT, SHARED, Axis, SampleAxis, SamplePlaces, signature_at

ADVICE = (
    "per-sample clipping would not bound one sample's influence. Look for statistics or shuffles over the batch, "
    "inputs that are not batch first, or a layer that mixes samples, and remove it. An input that samples share and "
    "that has as many rows as there are samples wants a leading dimension of 1"
)


class NeedsRule(BaseException):
    """Modules must run sample by sample: those around a patched module, or those that use another one's parameter. No
    Exception: only the recorder, which puts rules on modules, may catch it."""

    def __init__(self, wanted: Sequence[tuple[PatchedModule | nn.Module, nn.Parameter | None]], why: str) -> None:
        """why: what to say where that cannot be done."""
        super().__init__(why)
        self.wanted = wanted


class Expected(NamedTuple):
    """What the model returned for some records of a batch, among few: all of the batch must not change it."""

    records: list[int]
    results: list[tuple[Axis | None, Tensor]]
    precision: torch.dtype | None

    def refuse_others(self, results: list[Tensor], size: int) -> None:
        """Raise PrivacyError if the model returned something else for them in a batch of `size`."""
        for (axis, wanted), result in zip(self.results, results, strict=False):
            if isinstance(axis, SampleAxis) and result.requires_grad:
                found = axis.split(result.detach(), size)[self.records]
                if found.shape == wanted.shape and not alike(wanted, found.to(wanted.dtype), 300.0, self.precision):
                    raise PrivacyError(
                        f"samples of a batch influence each other before the model's output: in a batch of {size} the "
                        f"model returns something else for a sample than among few. {ADVICE[0].upper()}{ADVICE[1:]}"
                    )


class Look:
    """few: the records. base: the recorded forward, to which others were compared."""

    def __init__(self, few: FewRecords, base: Recording, owners: Sequence[int], fewer: int | None) -> None:
        """owners: for each sample the bits of the runs that changed it. fewer: records in the smaller batch, if any."""
        self.few, self.base, self.size, self._fewer = few, base, few.count, fewer
        self._owners = owners
        self._axes = {id(place.trail): locate(place.trail, self.size, owners, fewer) for place in base.places}
        for call in base.calls:
            if not call.may_mix:  # then its samples come out where they went in
                self._axes |= {id(out): self._axes[id(call.inputs[0])] for out in call.outputs}

    def axis(self, trail: Trail) -> Axis | None:
        """Where the samples are in a tensor; None where its entries belong to several of them."""
        return self._axes[id(trail)]

    def refuse(self, is_random: Callable[["Look", str], bool]) -> None:
        """Raise PrivacyError at the first place where samples are mixed.

        A single number that comes out is a loss, which the backward shows to be a sum over samples or not. What comes
        out without a gradient trains nothing.
        """
        if not all(decision.of_one_each(self._owners) for decision in self.base.decisions):
            raise PrivacyError(
                "the model looks at a number that it computes from several samples of a batch, and may do other things "
                f"by what it finds: {ADVICE}"
            )
        for where, trail, patched, apart in self.base.places:
            axis = self.axis(trail)
            if patched is None and (trail.value.numel() == 1 or not trail.trains):
                continue
            if axis is None and not (trail.trains is False and is_random(self, where)):
                why = f"samples of a batch influence each other {where}: {ADVICE}"
                if patched is None or not trail.of_one_each(self._owners):
                    raise PrivacyError(why)
                if not apart:
                    raise NeedsRule([(patched, None)], why)
                continue
            if axis is None or not self._depends_on_number(trail, axis):
                continue
            if not is_random(self, where):
                raise PrivacyError(
                    f"samples of a batch influence each other {where}: what a sample has there depends on how many "
                    f"others there are. {ADVICE[0].upper()}{ADVICE[1:]}"
                )

    def _depends_on_number(self, trail: Trail, axis: Axis) -> bool:
        return self._fewer is not None and trail.depends_on_number(axis, self.size, self._fewer, self.base.precision)

    def sharing(self) -> list[tuple[PatchedModule, None]]:
        """Patched modules that get what samples share, so that their rules return it once for each sample."""
        apart = {id(place.trail) for place in self.base.places if place.apart}
        found = [
            call.patched
            for call in self.base.calls
            if any(
                isinstance(leaf, Trail) and self.axis(leaf) == SHARED and id(leaf) not in apart
                for leaf in (*call.inputs, *call.outputs)
            )
        ]
        return [(patched, None) for patched in dict.fromkeys(found)]

    def intact(self) -> int:
        """Samples without NaN, at the place that has fewest of them."""
        axes = ((place.trail, self.axis(place.trail)) for place in self.base.places)
        return min((trail.intact(axis, self.size) for trail, axis in axes if axis is not None), default=self.size)

    def expected(self) -> Expected | None:
        """For records that are in the few as they are in the batch, where there are any."""
        records = self.few.as_they_are
        if not records:
            return None
        axes = [(self.axis(trail), trail.value) for trail in self.base.output]
        rows = [(a, a.split(v, self.size)[: len(records)] if isinstance(a, SampleAxis) else v) for a, v in axes]
        return Expected(records, rows, self.base.precision)

    def learn(self, known: dict[PatchedModule, KnownCalls], size: int) -> None:
        """Add how each call looks in a batch of `size` samples, and where its samples are."""
        for call in self.base.calls:
            places = self.places(call)
            looks = [leaf.value if isinstance(leaf, Trail) else leaf for leaf in call.inputs]
            axes = tuple(places.inputs)
            known[call.patched].add(signature_at(looks, axes, self.size, size), call.number, places)

    def places(self, call: Call) -> SamplePlaces:
        inputs = list(self._axes_of(call.inputs))
        for i, (leaf, fewer) in enumerate(zip(call.inputs, call.of_fewer, strict=False)):
            if type(leaf) is int and type(fewer) is int and (leaf, fewer) == (self.size, self._fewer):
                inputs[i] = COUNT
        return SamplePlaces(tuple(inputs), self._axes_of(call.outputs))

    def _axes_of(self, leaves: list[Any]) -> tuple[Axis, ...]:
        found = (self.axis(leaf) if isinstance(leaf, Trail) else SHARED for leaf in leaves)
        return tuple(SHARED if axis is None else axis for axis in found)
