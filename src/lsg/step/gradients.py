"""From per-sample gradients to `.grad`: the privacy rules in their order, or non-private gradients without them."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lsg.distributed.group import Group
from lsg.distributed.sharding import bytes_each, gradient_of, own
from lsg.errors import PrivacyError
from lsg.model.recorder import Recorder
from lsg.sampling.random_sources import NoiseSource
from lsg.step.clipping import ClippedSum, Clipper
from lsg.step.exchange import Place, of_all_ranks, still_alike
from lsg.step.noise import add_noise
from lsg.step.signals import StepSignals, measure
from lsg.step.unit_average import average_units

LossReduction = Literal["mean", "sum"]


class GradientSource(Protocol):
    """Where gradients of a logical batch come from: micro-batch by micro-batch, then released as one.

    signals: what the last release was made of, not private; None before the first, and without clipping and noise.
    """

    loss_reduction: LossReduction
    expected_batch_size: int
    signals: StepSignals | None

    def collect(self, expected_size: int | None, unit_rows: Sequence[int] | None = None) -> None:
        """Take in the gradients that the last backward pass left, of so many rows if that is known.

        unit_rows: how many of the rows, one unit after the other, are each unit's; None where nobody has told."""

    def drop_pending(self) -> None:
        """Forget gradients that were not collected."""

    def pending(self) -> bool:
        """Whether a backward pass left gradients that were not collected."""

    def renew(self) -> None:
        """A new micro-batch: what an earlier one still computes must not reach it."""

    def left_over(self) -> bool:
        """Whether an earlier micro-batch left gradients that nobody collected or dropped."""

    def note_filler(self, filler: bool) -> None:
        """Whether the micro-batch in flight is there to keep ranks in step: nothing of it is to be collected."""

    def forget_sum(self) -> None:
        """Drop what was collected since the last release."""

    def partial_sum(self) -> dict[str, Any] | None:
        """What was collected since the last release, as tensors and numbers. It is not private."""

    def load_partial_sum(self, state: dict[str, Any]) -> None:
        """Go on from what `partial_sum` returned."""

    def exchange(self, place: Place) -> None:
        """The logical batch is complete on this rank: from here on the sum is that of all ranks."""

    def release(self, noise_multiplier: float) -> None:
        """Put the gradient of the logical batch into the parameters' `.grad`, and start the next batch."""


class PrivateGradients:
    """Average over each unit's rows, clip, sum, add noise, lift: the privacy rules in the order of the design.

    views: how many adjacent rows each record has. named_units: units are records with the same id, so that only the
    loader knows which rows are whose. group: the ranks that share each logical batch.
    """

    def __init__(
        self,
        recorder: Recorder,
        clipper: Clipper,
        *,
        loss_reduction: LossReduction,
        expected_batch_size: int,
        noise: NoiseSource,
        views: int = 1,
        named_units: bool = False,
        group: Group | None = None,
    ) -> None:
        self.recorder, self.clipper, self._group = recorder, clipper, group or Group()
        self._views, self._named_units = views, named_units
        self.loss_reduction: LossReduction = loss_reduction
        self.expected_batch_size = expected_batch_size
        self.noise = noise
        self.sum: ClippedSum | None = None
        self._whole = False  # whether the sum is already that of all ranks
        self.signals: StepSignals | None = None

    def pending(self) -> bool:
        return self.recorder.pending

    def drop_pending(self) -> None:
        self.recorder.clear()

    def renew(self) -> None:
        self.recorder.renew()

    def note_filler(self, filler: bool) -> None:
        self.recorder.batch.filler = filler

    def left_over(self) -> bool:
        return self.recorder.left_over

    def forget_sum(self) -> None:
        self.recorder.let_go_subspaces()
        self.sum, self._whole = None, False

    def partial_sum(self) -> dict[str, Any] | None:
        return None if self.sum is None else dict(vars(self.sum))

    def load_partial_sum(self, state: dict[str, Any]) -> None:
        slots = self.recorder.ready()  # the subspaces that the sum lives in
        like = next(iter(slots.values()))
        device = like.device
        tensors = {key: value.to(device) for key, value in state.items() if isinstance(value, Tensor)}
        self.sum = ClippedSum(**state | tensors)
        self.recorder.hold_subspaces()

    @torch.no_grad()
    def collect(self, expected_size: int | None, unit_rows: Sequence[int] | None = None) -> None:
        if self.recorder.missed:
            raise PrivacyError(
                "between a forward and its backward came a forward of another number of samples, and the gradients of "
                "the first are lost: run forwards that are not for training under torch.no_grad()"
            )
        if self.recorder.batch.filler:
            self.recorder.hold_subspaces()  # as the ranks do that have a share
            self.recorder.clear()
            return
        if not self.recorder.pending:
            return
        size = self.recorder.records
        assert size is not None
        if expected_size is not None and size != expected_size:
            self._refuse_size(size, expected_size)
        unit_rows = self._unit_rows(size) if unit_rows is None else unit_rows
        scale = size if self.loss_reduction == "mean" else 1.0  # a mean over the rows: times their number
        # Rows that padding added copy a record: they must not enter the sum, whatever became of their outputs.
        per_unit = [[part[:size] for part in parts] for parts in self.recorder.per_sample()]
        if unit_rows is not None:
            per_unit = [[average_units(part, unit_rows) for part in parts] for parts in per_unit]
        part = self.clipper.clip(per_unit, scale, self.recorder.positions)
        self.sum = part if self.sum is None else self.sum + part
        self.recorder.hold_subspaces()
        self.recorder.clear()

    def _refuse_size(self, size: int, expected: int) -> None:
        records, meaning = f"{expected} records", "the record"
        if self._views > 1:
            records = f"{expected // self._views} records, which with views={self._views} are {expected} rows,"
            meaning = f"the row, with the {self._views} views of a record adjacent"
        raise PrivacyError(
            f"the loader handed out {records} but the model took them for {size} samples: the first dimension of the "
            f"model's first input must be {meaning}, or clipping would not bound a record"
        )

    def _unit_rows(self, rows: int) -> list[int] | None:
        """Rows of each unit of a batch of which nobody has told; None where each row is a unit."""
        if self._named_units:
            raise PrivacyError(
                "a batch that the private loader did not hand out: whose records these are is not known, so with "
                "unit_of there can be no step on it. Iterate over the loader that make_private returned"
            )
        if rows % self._views:
            raise PrivacyError(
                f"a batch of {rows} rows, but with views={self._views} each record has {self._views} rows, adjacent: "
                f"the number of rows must be a multiple of {self._views}"
            )
        return [self._views] * (rows // self._views) if self._views > 1 else None

    @torch.no_grad()
    def exchange(self, place: Place) -> None:
        if self._whole:  # a step that was refused after the exchange, by a full disk say, is tried again
            still_alike(place, self._group)
            return
        if not self._group.alone:
            self.recorder.ready()  # a rank without a share has made no subspaces for this step yet
        own = self.sum
        units, bound = (0, self.clipper.bound) if own is None else (own.units, own.bound)
        units, bound = of_all_ranks(units, bound, place, self._group)
        if self._group.alone:
            return
        own = own or self._empty_sum()
        shortened = torch.as_tensor(own.shortened, dtype=own.vector.dtype).to(own.vector.device)
        together = self._group.sum(torch.cat([own.vector, shortened.reshape(1)]))
        shortened = together[-1].double()
        self.sum = replace(own, vector=together[:-1], bound=bound, units=units, shortened=shortened)
        self._whole = True
        self.recorder.hold_subspaces()

    @torch.no_grad()
    def release(self, noise_multiplier: float) -> None:
        for parameter, gradient in self._lifted(self._noisy_mean(noise_multiplier)):
            parameter.grad = gradient
        self._end_logical_step()

    @torch.no_grad()
    def release_in_parts(self, noise_multiplier: float, part_bytes: int) -> Iterator[None]:
        """Does the same for a part of the parameters at a time.

        At each turn the next parameters have a `.grad`, of `part_bytes` or little more together, and those of the turn
        before have none any more.
        """
        part: list[nn.Parameter] = []
        size = 0
        for parameter, gradient in self._lifted(self._noisy_mean(noise_multiplier)):
            parameter.grad = gradient
            part.append(parameter)
            size += bytes_each(gradient)
            del gradient
            if size >= part_bytes:
                yield
                drop_gradients(part)
                part, size = [], 0
        if part:
            yield
            drop_gradients(part)
        self._end_logical_step()

    def _noisy_mean(self, noise_multiplier: float) -> Tensor:
        """The logical batch's clipped and noisy mean, as one vector of factors and dense gradients, not yet lifted."""
        self.recorder.ready()
        clipped = self.sum if self.sum is not None else self._empty_sum()
        noisy = add_noise(clipped, noise_multiplier, self.noise)
        # Rule 4: the expected batch size, never the actual one.
        divisor = self.expected_batch_size if self.loss_reduction == "mean" else 1
        self.signals = measure(clipped, noisy, divisor=divisor, mode=self.clipper.mode)
        return noisy.vector / divisor

    def _lifted(self, mean: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields each trained parameter with its gradient, made at that turn; a fused one after its last part."""
        parts_left = Counter(slot.parameter for slot in self.recorder.slots.values())
        fused: dict[nn.Parameter, Tensor] = {}
        for slot, gradient in self.recorder.lift(mean):
            parameter = slot.parameter
            if slot.narrow is not None:
                whole = fused[parameter] if parameter in fused else torch.zeros_like(own(parameter))
                slot.part_of(whole).copy_(gradient)
                fused[parameter] = whole
                parts_left[parameter] -= 1
                if parts_left[parameter]:
                    continue
                gradient = fused.pop(parameter)
            yield parameter, gradient_of(parameter, gradient)
            del gradient  # frees it before the next one is made

    def _end_logical_step(self) -> None:
        self.sum, self._whole = None, False
        self.recorder.end_logical_step()

    def _empty_sum(self) -> ClippedSum:
        slots = list(self.recorder.slots.values())
        total = sum(slot.dimensions for slot in slots)
        dtype = functools.reduce(torch.promote_types, (slot.dtype for slot in slots))  # as of sums put together
        return ClippedSum(torch.zeros(total, dtype=dtype, device=slots[0].device), self.clipper.bound)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
