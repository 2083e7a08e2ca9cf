"""A Trainer's loader in; how its records enter logical steps out, and a loader of those.

Trainer takes a loader's batch for what one device computes at once; lsg takes it for a whole logical batch.
"""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from lsg.sampling.loader import batch_of_a_process, loading_settings, sampling_generator
from lsg.sampling.plan import SamplingPlan


@dataclass(frozen=True)
class Batches:
    """plan: what sampler, noise and schedule are made from. most: what a device computes at once. loader: over the same
    records, whose batch is that of a logical step, on all processes together. Where records have units these are units.
    """

    plan: SamplingPlan
    most: int
    loader: DataLoader[Any]

    @property
    def rows(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]


def logical_batches(given: DataLoader[Any], units: list[Any] | None, args: Any) -> Batches:
    """given: by get_train_dataloader, Trainer's or a user's. args: TrainingArguments."""
    most = batch_of_a_process(given, args.world_size)
    size = most * args.gradient_accumulation_steps * args.world_size
    loader = DataLoader(given.dataset, batch_size=size, generator=sampling_generator(given), **loading_settings(given))
    return Batches(SamplingPlan(count_units(units, given.dataset), size), most, loader)


def count_units(units: list[Any] | None, dataset: Sized | Any) -> int:
    return len(dataset) if units is None else len(set(units))
