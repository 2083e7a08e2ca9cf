"""Engines broken on purpose, one way each. Inside the `with` block every engine is broken like that."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from lsg.parameters.slot import Slot
from lsg.parameters.stack import Stack
from lsg.sampling.poisson_batches import LogicalBatches
from lsg.sampling.random_sources import NoiseSource
from lsg.sampling.units import Units
from lsg.step.clipping import ClippedSum, Clipper
from lsg.step.gradients import PrivateGradients
from lsg.step.noise import add_noise


@contextmanager
def factors_clipped_one_by_one() -> Iterator[None]:
    """Each factor's gradient to C by itself, while the sum still says that its sensitivity is C."""

    def clip(self: Clipper, per_sample: Any, loss_scale: float, positions: Any = None) -> ClippedSum:
        parts = [part * loss_scale for parts in per_sample for part in parts]
        clipped = [part * (self.bound / part.norm(dim=1, keepdim=True)).clamp(max=1) for part in parts]
        return ClippedSum(torch.cat([part.sum(0) for part in clipped]), self.bound)

    with patch.object(Clipper, "clip", clip):
        yield


@contextmanager
def noise_forgotten_on_one_layer(layer: str = "second") -> Iterator[None]:
    with _noise(lambda clipped, noisy, gradients: _unless(layer, clipped, noisy, gradients)):
        yield


@contextmanager
def noise_divided_by_the_batch_size_twice() -> Iterator[None]:
    """Once with the sum, and once on its own."""
    with _noise(lambda clipped, noisy, gradients: clipped + (noisy - clipped) / gradients.expected_batch_size):
        yield


@contextmanager
def half_the_noise() -> Iterator[None]:
    with _noise(lambda clipped, noisy, gradients: clipped + (noisy - clipped) / 2):
        yield


@contextmanager
def mask_after_the_norm() -> Iterator[None]:
    """Norms count what is masked, and only then is it dropped."""
    important, collect = Stack._important, PrivateGradients.collect

    def unmasked(self: Stack, *args: Any) -> Any:
        self.hidden = important(self, *args)  # type: ignore[attr-defined]
        return None, None

    def parts(self: Slot) -> list[torch.Tensor]:
        return [gradient.flatten(1) for gradient in self.gradients()]

    def masked_at_last(
        self: PrivateGradients, expected_size: int | None, unit_rows: Sequence[int] | None = None
    ) -> None:
        kept = []
        for stack in self.recorder.stacks:
            on_left, on_right = stack.hidden  # type: ignore[attr-defined]
            on_rows, on_columns = (on_right, on_left) if stack.layout.transposed else (on_left, on_right)
            for k, slot in enumerate(stack.slots):
                for units, shape in zip((on_rows, on_columns), slot.shapes(1), strict=True):
                    kept.append((units[1][k] >= 0).expand(shape[1:]).flatten())
        dense = [slot for slot in self.recorder.in_order if slot.layout is None]
        choice = [slot.elements_kept for slot in dense]
        for slot in dense:
            slot.elements_kept = None
        collect(self, expected_size, unit_rows)
        assert self.sum is not None
        for slot, elements in zip(dense, choice, strict=True):
            slot.elements_kept = elements
            kept.append(_flags(slot.value.numel(), elements))
        mask = torch.cat(kept)
        vector = self.sum.vector * mask
        if any(elements is not None for elements in choice):  # of Sparse DPSGD only the kept ones have a place
            vector = vector[mask]
        self.sum = replace(self.sum, vector=vector)

    with (
        patch.object(Stack, "_important", unmasked),
        patch.object(Slot, "parts", parts),
        patch.object(PrivateGradients, "collect", masked_at_last),
    ):
        yield


@contextmanager
def shuffled_but_accounted_as_poisson() -> Iterator[None]:
    def draw(self: LogicalBatches, count: int) -> list[torch.Tensor]:
        return list(torch.randperm(self.plan.records).chunk(count))

    with patch.object(LogicalBatches, "_draw", draw):
        yield


@contextmanager
def each_record_of_a_unit_clipped_by_itself() -> Iterator[None]:
    """The rows of a unit are not averaged, so that each of them reaches C."""
    with patch("lsg.step.gradients.average_units", lambda part, unit_rows: part):
        yield


@contextmanager
def noise_for_one_of_three_records() -> Iterator[None]:
    """As if a unit's three records shared the noise, too."""
    with _noise(lambda clipped, noisy, gradients: clipped + (noisy - clipped) / 3):
        yield


@contextmanager
def a_unit_drawn_with_any_of_its_records() -> Iterator[None]:
    """Records are drawn at the rate that the accountant knows, and the unit of each comes with it."""

    def draw(self: LogicalBatches, count: int) -> list[torch.Tensor]:
        rate, sizes = self.plan.sample_rate, [len(own) for own in self.units._records]
        steps = [[bool((self.source.uniform(size) < rate).any()) for size in sizes] for _ in range(count)]
        return [torch.tensor(drawn).nonzero().flatten() for drawn in steps]

    with patch.object(LogicalBatches, "_draw", draw):
        yield


@contextmanager
def records_of_a_unit_drawn_one_by_one() -> Iterator[None]:
    """A unit that was drawn comes with some of its records, whichever those are."""
    records_of = Units.records_of

    def some(self: Units, unit: int, source: NoiseSource) -> list[int]:
        whole = records_of(self, unit, source)
        return whole[: 1 + int(source.uniform(1) * len(whole))]

    with patch.object(Units, "records_of", some):
        yield


@contextmanager
def no_noise() -> Iterator[None]:
    with _noise(lambda clipped, noisy, gradients: clipped):
        yield


@contextmanager
def _noise(change: Any) -> Iterator[None]:
    """`change` gets the clipped sum, the noisy one and who releases it, and returns what is released."""
    release = PrivateGradients.release

    def spoiled_release(self: PrivateGradients, noise_multiplier: float) -> None:
        def spoiled(clipped: ClippedSum, *args: Any) -> Any:
            noisy = add_noise(clipped, *args)
            return replace(noisy, vector=change(clipped.vector, noisy.vector, self))

        with patch("lsg.step.gradients.add_noise", spoiled):
            release(self, noise_multiplier)

    with patch.object(PrivateGradients, "release", spoiled_release):
        yield


def _unless(layer: str, clipped: torch.Tensor, noisy: torch.Tensor, gradients: PrivateGradients) -> torch.Tensor:
    silent = [torch.full((slot.dimensions,), layer in slot.name) for slot in gradients.recorder.in_order]
    return torch.where(torch.cat(silent), clipped, noisy)


def _flags(size: int, kept: torch.Tensor | None) -> torch.Tensor:
    return torch.ones(size).bool() if kept is None else torch.zeros(size).bool().index_fill(0, kept, True)
