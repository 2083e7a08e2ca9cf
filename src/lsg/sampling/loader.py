"""The private DataLoader: Poisson logical batches as physical micro-batches, with empty draws handled out of sight."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lsg.errors import ConfigurationError
from lsg.sampling.clock import Clock
from lsg.sampling.plan import SamplingPlan
from lsg.sampling.poisson_batches import Filler, LogicalBatches


class TakesSteps(Protocol):
    """Who takes the step of a logical batch, and knows what ranks must have in common: the private optimizer."""

    def step(self) -> None: ...

    def check_replicas(self) -> None: ...


class PrivateDataLoader(DataLoader[Any]):
    """Iterates like any DataLoader over non-empty micro-batches, and moves the clock. Has the optimizer take the step
    of a logical batch that is empty, or of which this rank has no share: the loop does not see it."""

    def __init__(self, source: DataLoader[Any], sampler: LogicalBatches, clock: Clock, optimizer: TakesSteps) -> None:
        self._clock, self._optimizer = clock, optimizer
        super().__init__(
            source.dataset,
            batch_sampler=sampler,
            # For the seeds of workers. torch's default generator would do, but an epoch continued in its middle starts
            # its workers again, which must not shift the model's dropout.
            generator=torch.Generator(),
            num_workers=source.num_workers,
            collate_fn=source.collate_fn,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
            persistent_workers=source.persistent_workers,
            pin_memory_device=source.pin_memory_device,
        )
        self.logical = sampler

    @property
    def sample_rate(self) -> float:
        return self.logical.plan.sample_rate

    def steps(self, epochs: int) -> int:
        """Logical steps in that many epochs: what a learning-rate schedule wants to know. Where the records are not a
        multiple of the batch size epochs differ by a step, and `len` is that of the first."""
        return self.logical.plan.steps(epochs)

    @property
    def epoch(self) -> int:
        """Epochs done. The next loop over the loader is epoch number `epoch`, counted from 0, or what is left of it."""
        return self._clock.epochs_done

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        clock = self._clock
        loop = clock.enter_epoch()
        epoch = self.logical.draw_epoch(clock.epochs_done, *clock.done)
        self.generator.manual_seed(self.logical.epoch_seed())
        with self.logical.handed_out():
            batches = super().__iter__()
        try:
            with self.logical.group.loop():
                for logical, drawn, share in zip(epoch, self.logical.drawn, self.logical.shares, strict=True):
                    if not logical:
                        clock.begin_micro_batch(loop, size=0, last=True, drawn=drawn, share=share)
                        self._optimizer.step()
                    for number, records in enumerate(logical, start=1):
                        batch = next(batches)
                        clock.begin_micro_batch(
                            loop,
                            size=len(records) * self.logical.units.views,
                            last=number == len(logical),
                            unit_rows=self.logical.units.unit_rows(records),
                            drawn=drawn,
                            share=share,
                            filler=isinstance(records, Filler),
                        )
                        yield batch
                clock.check_stepped(loop)
                self._optimizer.check_replicas()
        finally:
            if clock.leave_epoch(loop):
                self.logical.leave_epoch()


def sampling_plan(loader: DataLoader[Any], *, poisson: bool, ranks: int = 1) -> SamplingPlan:
    """The plan behind a user's loader; refuses sampling that cannot be replaced without changing its meaning.

    ranks: processes that share the logical batches. A loader's batch is a logical batch of all of them, but for one
    with a `DistributedSampler`, whose batch is one rank's."""
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(f"data_loader is a {type(loader).__name__}; it must be a torch DataLoader")
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"data_loader's data set ({type(dataset).__name__}) has no length: Poisson sampling needs to know and to "
            "reach every record; use a map-style data set"
        )
    if isinstance(loader, PrivateDataLoader):
        return SamplingPlan(len(dataset), loader.logical.plan.batch_size, poisson)
    sampler, batch_size = loader.sampler, loader.batch_size
    if batch_size is None:
        if type(loader.batch_sampler) is BatchSampler:
            sampler, batch_size = loader.batch_sampler.sampler, loader.batch_sampler.batch_size
        elif loader.batch_sampler is not None:
            raise _not_poisson(loader.batch_sampler)
        else:
            raise ConfigurationError("data_loader has batch_size=None (no batching): give it a batch_size")
    if type(sampler) is DistributedSampler:
        if sampler.num_replicas != ranks:
            raise ConfigurationError(
                f"data_loader's DistributedSampler has num_replicas={sampler.num_replicas}, but make_private found "
                f"{ranks} process(es): let it find out by itself, or make the DataLoader without a sampler; lsg samples"
            )
        return SamplingPlan(len(dataset), batch_size * ranks, poisson)
    replaceable = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset)
    )
    if not replaceable:
        raise _not_poisson(sampler)
    return SamplingPlan(len(dataset), batch_size, poisson)


def _not_poisson(sampler: Any) -> ConfigurationError:
    return ConfigurationError(
        f"data_loader samples with {type(sampler).__name__}, which is not Poisson sampling: epsilon would not hold. "
        "Use DataLoader(dataset, batch_size=...) without a sampler of its own; lsg samples for it"
    )


def known_lengths(dataset: Any) -> Tensor | None:
    """Lengths of the records where the data set tells them, a number each: an attribute `lengths`, or a column
    `length`."""
    lengths = getattr(dataset, "lengths", None)
    if lengths is None and "length" in (getattr(dataset, "column_names", None) or ()):
        lengths = dataset["length"]
    try:
        numbers = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):  # there are none, or the name means something else there
        return None
    return numbers if numbers.shape == (len(dataset),) else None


def sampling_generator(loader: DataLoader[Any]) -> torch.Generator | None:
    """The generator that the user gave the loader, as in Opacus."""
    if isinstance(loader, PrivateDataLoader):  # has the generator of the engine that made it
        return None
    generator = loader.generator
    if generator is None:
        generator = getattr(loader.sampler, "generator", None)
    return generator
