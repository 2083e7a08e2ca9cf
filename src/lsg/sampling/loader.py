"""The private DataLoader: Poisson logical batches as physical micro-batches, with empty draws handled out of sight."""

import contextlib
import warnings
import weakref
from collections.abc import Generator, Iterator
from typing import Any, Literal, Protocol

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

from lsg.errors import ConfigurationError, PrivacyError
from lsg.sampling.clock import Clock
from lsg.sampling.plan import SamplingPlan
from lsg.sampling.poisson_batches import Filler, Logical, LogicalBatches


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
            **loading_settings(source),
        )
        self.logical = sampler
        self.length: Literal["batches", "steps"] = "batches"
        self._under_way: weakref.ref[Generator[Iterator[Any]]] | None = None  # the loop over this loader
        self._left_early: str | None = None  # what to tell when another epoch begins

    def __len__(self) -> int:
        """How many batches the loop under way yields, or else the next one: Poisson batches differ, and so do epochs.
        With `length = "steps"` logical steps in an epoch, which optimizer.step() takes at the end of each."""
        if self.length not in ("batches", "steps"):
            raise ConfigurationError(f"loader.length={self.length!r} must be 'batches' or 'steps'")
        if self.length == "batches" and self._clock.epoch is not None:
            return sum(map(len, self.logical.epoch))
        ahead = self.logical.batches_ahead(*self._clock.next_place) if self.length == "batches" else None
        return self.steps(1) if ahead is None else ahead

    @property
    def sample_rate(self) -> float:
        return self.logical.plan.sample_rate

    def steps(self, epochs: int) -> int:
        """Logical steps in that many epochs: what a learning-rate schedule wants to know. Where the records are not a
        multiple of the batch size epochs differ by a step."""
        return self.logical.plan.steps(epochs)

    @property
    def epoch(self) -> int:
        """Epochs done. The next loop over the loader is epoch number `epoch`, counted from 0, or what is left of it."""
        return self._clock.epochs_done

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        with contextlib.closing(self.logical_batches()) as epoch:
            self._under_way = weakref.ref(epoch)
            for micro_batches in epoch:
                empty = True
                for batch in micro_batches:
                    empty = False
                    yield batch
                if empty:
                    self._optimizer.step()

    def finish_epoch(self) -> None:
        """Take the steps of empty draws that follow the last batch: for loops that stop by themselves when they have
        had `len(loader)` batches. Nothing is left of an epoch that was iterated over to its end."""
        epoch = None if self._under_way is None else self._under_way()
        for micro_batches in epoch or ():
            if next(micro_batches, None) is not None:
                raise PrivacyError("finish_epoch(): batches with records are left in the epoch: iterate over them")
            self._optimizer.step()

    def logical_batches(self) -> Generator[Iterator[Any]]:
        """The epoch as logical batches, each an iterator of its micro-batches: for loops that count logical steps.

        The caller calls `optimizer.step()` after each micro-batch, and once for a logical batch that has none.
        """
        clock = self._clock
        if self._left_early is not None:
            warnings.warn(self._left_early, stacklevel=3)
        loop, whole, self._left_early = clock.enter_epoch(), False, None
        drawn = self.logical.draw_epoch(clock.epochs_done, *clock.done)
        self.generator.manual_seed(self.logical.epoch_seed())
        with self.logical.handed_out():
            batches = super().__iter__()
        try:
            with self.logical.group.loop():
                for logical, units, share in zip(drawn, self.logical.drawn, self.logical.shares, strict=True):
                    if not logical:
                        clock.begin_micro_batch(loop, size=0, last=True, drawn=units, share=share)
                    yield self._micro_batches(loop, batches, logical, units, share)
                    clock.check_whole(loop)
                clock.check_stepped(loop)
                self._optimizer.check_replicas()
                whole = True
        finally:
            (done, partly), failed = clock.done, not clock.batch.stepped
            if clock.leave_epoch(loop):
                self.logical.leave_epoch()
                if not whole and not failed and (partly or 0 < done < len(drawn)):
                    self._note_left(done, partly, len(drawn))

    def _note_left(self, done: int, partly: int, steps: int) -> None:
        """The loop was left before its end, for good or for another epoch: told if another one begins. (An error in a
        batch that had no step yet tells of itself.)"""
        dropped = f", and what {partly} micro-batches of the next one had summed up was dropped" if partly else ""
        self._left_early = (
            f"the loader was left after {done} of the {steps} logical steps of an epoch{dropped}, and now another "
            "epoch begins: epochs have fewer steps than the plan says. Does the loop count batches, and take "
            "len(loader) for steps? Leave where optimizer.stepped is True; loader.steps(epochs) tells logical steps"
        )

    def _micro_batches(
        self, loop: int, batches: Iterator[Any], logical: Logical, units: int, share: int
    ) -> Iterator[Any]:
        """One logical batch, of so many units on all ranks; share: this rank's of them."""
        for number, records in enumerate(logical, start=1):
            batch = next(batches)
            self._clock.begin_micro_batch(
                loop,
                size=len(records) * self.logical.units.views,
                last=number == len(logical),
                unit_rows=self.logical.units.unit_rows(records),
                drawn=units,
                share=share,
                filler=isinstance(records, Filler),
            )
            yield batch


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
    sampler: Any = loader.sampler
    batch_size = loader.batch_size
    if batch_size is None:
        batch_sampler, shared_by = _without_accelerate(loader.batch_sampler, ranks)
        if type(batch_sampler) is BatchSampler:
            sampler, batch_size = batch_sampler.sampler, batch_sampler.batch_size * shared_by
        elif (drawn := _opacus_batch_size(loader.batch_sampler)) is not None:
            return SamplingPlan(len(dataset), drawn, poisson)
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
    shuffles = type(sampler) is RandomSampler or _is_accelerates(sampler, "SeedableRandomSampler")
    replaceable = type(sampler) is SequentialSampler or (
        shuffles and not sampler.replacement and sampler.num_samples == len(dataset)
    )
    if not replaceable:
        raise _not_poisson(sampler)
    return SamplingPlan(len(dataset), batch_size, poisson)


def batch_of_a_process(loader: DataLoader[Any], ranks: int) -> int:
    """The batch that one of so many processes gets where a loader's batch is one process's, as in Trainer's loop."""
    shared = type(loader.sampler) is DistributedSampler or _is_accelerates(loader.batch_sampler, "BatchSamplerShard")
    size = sampling_plan(loader, poisson=True, ranks=ranks).batch_size
    return size // ranks if shared else size


def loading_settings(source: DataLoader[Any]) -> dict[str, Any]:
    """How a loader reads records, apart from which: what another one over the same records is made with."""
    return {
        "num_workers": source.num_workers,
        "collate_fn": source.collate_fn,
        "pin_memory": source.pin_memory,
        "timeout": source.timeout,
        "worker_init_fn": source.worker_init_fn,
        "multiprocessing_context": source.multiprocessing_context,
        "prefetch_factor": source.prefetch_factor,
        "persistent_workers": source.persistent_workers,
        "pin_memory_device": source.pin_memory_device,
    }


def _without_accelerate(batch_sampler: Any, ranks: int) -> tuple[Any, int]:
    """A batch sampler that Accelerate has wrapped to give each process its batches, as it was before; and how many of
    its batches make a logical one."""
    if not _is_accelerates(batch_sampler, "BatchSamplerShard") or batch_sampler.num_processes != ranks:
        return batch_sampler, 1
    return batch_sampler.batch_sampler, 1 if batch_sampler.split_batches else ranks


def _is_accelerates(value: Any, name: str) -> bool:
    """Accelerate need not be imported for this."""
    return type(value).__name__ == name and type(value).__module__ == "accelerate.data_loader"


def _opacus_batch_size(sampler: Any) -> int | None:
    """The expected batch size of Opacus's Poisson sampler, on all ranks together; None of any other sampler.

    Opacus need not be imported for this."""
    kind = type(sampler)
    if kind.__name__ not in ("UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler"):
        return None
    if kind.__module__.partition(".")[0] != "opacus":
        return None
    records = getattr(sampler, "total_size", None) or sampler.num_samples
    return max(1, round(sampler.sample_rate * records))


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
    for sampler in (loader.sampler, loader.batch_sampler):
        if generator is None:
            generator = getattr(sampler, "generator", None)
    return generator
