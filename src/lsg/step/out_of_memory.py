"""Out of memory in a micro-batch: it is tried again in smaller pieces, and the logical batch's step stays the same.

A loop of one's own, where `lsg.train.loop.train` is not used:

    backward = BackwardInPieces(model, optimizer, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    for batch in loader:
        loss = backward(batch)
        optimizer.step()
        optimizer.zero_grad()
"""

import gc
import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lsg.errors import ConfigurationError, OutOfMemory, is_out_of_memory
from lsg.model.inputs import batch_size
from lsg.step.optimizer import PrivateOptimizer

Loss = Callable[[nn.Module, Any], Tensor]


class BackwardInPieces:
    """Forward, backward, clipping and summing of a batch of the private loader; what is left is `optimizer.step()`.

    When memory runs out, the attempt is dropped and the batch's records go on in pieces of half the size, down to
    single ones (or whole units, where a unit has several rows). Each record enters the sum once, the step is taken and
    accounted once. The size that fitted is kept: `largest`, None as long as all did.

    loss: (model, batch) -> the loss of a batch, with the engine's `loss_reduction`.
    """

    def __init__(self, model: nn.Module, optimizer: PrivateOptimizer, loss: Loss) -> None:
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self.largest: int | None = None

    def __call__(self, batch: Any) -> Tensor:
        """The loss of the whole batch, cut off from autograd. It is not private."""
        size = batch_size(batch)
        if size is None:
            raise ConfigurationError(
                f"a batch of type {type(batch).__name__} holds no tensor with a row for each record"
            )
        mean = self._optimizer.gradients.loss_reduction == "mean"
        units, rows_each = self._units(size)
        total: Tensor | None = None
        done = 0
        while done < size:
            count = units.fitting(done, self.largest or size)
            part = batch if count == size else rows(batch, done, count, size)
            value = self._attempt(part, count * rows_each)
            if value is None:
                self._shrink(count, smallest=units.fitting(done, 1))
                continue
            share = value * (count / size) if mean and count < size else value
            total = share if total is None else total + share
            done += count
        assert total is not None
        return total

    def _units(self, size: int) -> tuple["_Pieces", int]:
        """How a batch of `size` entries may be cut, and how many rows each entry is for the model: one, or all views of
        a record where the loss makes them."""
        in_flight = self._optimizer.clock.batch
        unit_rows = in_flight.units_among(in_flight.left)
        if not unit_rows:
            return _Pieces(tuple(range(size + 1))), 1
        rows_each, rest = divmod(sum(unit_rows), size)
        if rest or any(own % rows_each for own in unit_rows):
            raise ConfigurationError(
                f"a batch of {size} entries for {sum(unit_rows)} rows of {len(unit_rows)} units: each entry must be a "
                "row, or a record with all its views"
            )
        return _Pieces(tuple(itertools.accumulate((own // rows_each for own in unit_rows), initial=0))), rows_each

    def _attempt(self, part: Any, count: int) -> Tensor | None:
        """None where memory ran out: nothing of the attempt is left then, neither in the sum nor in memory.

        count: rows that the part is for the model."""
        try:
            value = self._loss(self._model, part)
            value.backward()
            self._optimizer.accumulate(count)
            return value.detach()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if self._optimizer.sharded is not None:
            raise OutOfMemory(
                f"memory ran out with {count} samples at once. The weights are sharded, so that other ranks wait for "
                "this one in the middle of the model, and it cannot try again with fewer: use a smaller "
                "max_physical_batch_size, activation checkpointing or bfloat16"
            )
        # Only here, past the error and its traceback, are the attempt's tensors free.
        self._optimizer.gradients.renew()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return None

    def _shrink(self, count: int, smallest: int) -> None:
        if count == smallest > 1:
            raise OutOfMemory(
                f"not even one unit of {count} records or views fits into memory, and a unit's rows must be in one "
                "part, as they are averaged before the clip: use a smaller max_records_per_unit or fewer views, "
                "shorter or smaller inputs, activation checkpointing, bfloat16 or a smaller model"
            )
        if count == 1:
            raise OutOfMemory(
                "not even one sample fits into memory, so max_physical_batch_size=1 would not help: use shorter or "
                "smaller inputs, activation checkpointing, bfloat16 or a smaller model"
            )
        self.largest = (count + 1) // 2
        warnings.warn(
            f"memory ran out with {count} samples at once; going on with {self.largest} at a time, which changes no "
            f"step. max_physical_batch_size={self.largest} saves the attempts",
            stacklevel=4,
        )


@dataclass(frozen=True)
class _Pieces:
    """Where a batch may be cut: ends of units, from 0 to the batch's size."""

    ends: tuple[int, ...]

    def fitting(self, start: int, most: int) -> int:
        """Entries of the whole units from `start` on that are at most `most`, or of one unit."""
        later = self.ends[self.ends.index(start) + 1 :]
        return max([end for end in later if end - start <= most], default=later[0]) - start


def rows(batch: Any, start: int, count: int, size: int) -> Any:
    """`count` records from `start` on, of a batch of `size`: tensors, and lists with an entry for each record, inside
    tuples, lists and mappings (which become dicts). What has no entries for records is kept as it is."""
    if isinstance(batch, Tensor):
        if batch.dim() == 0:
            return batch
        if batch.shape[0] != size:
            raise ConfigurationError(
                f"memory ran out with {size} records at once, and the batch cannot be cut: it has a tensor of shape "
                f"{tuple(batch.shape)}, whose first dimension is not the record. Set a smaller max_physical_batch_size"
            )
        return batch[start : start + count]
    if isinstance(batch, Mapping):
        return {key: rows(value, start, count, size) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        if len(batch) == size and not any(isinstance(item, Tensor | Mapping | list | tuple) for item in batch):
            return batch[start : start + count]
        parts = [rows(item, start, count, size) for item in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
