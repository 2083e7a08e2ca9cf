"""The one clock of a run: epochs, logical batches and micro-batches. The loader moves it, the optimizer reads it.

Who hands out batches without the private loader (a benchmark, say) moves it as the loader does:

    epoch = clock.enter_epoch()
    clock.begin_micro_batch(epoch, size=len(x), last=True)
    loss(model(x)).backward()
    optimizer.step()
    clock.leave_epoch(epoch)
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lsg.errors import PrivacyError


class Gradients(Protocol):
    """What the clock tells those who hold the gradients, and asks them."""

    def pending(self) -> bool:
        """Whether a backward pass left gradients that were not collected."""

    def drop_pending(self) -> None:
        """Forget gradients that were not collected."""

    def renew(self) -> None:
        """A new micro-batch: what an earlier one still computes must not reach it."""

    def note_filler(self, filler: bool) -> None:
        """Whether the micro-batch in flight is there to keep ranks in step: nothing of it, or a part of it, is kept."""

    def forget_sum(self) -> None:
        """Drop what was collected since the last release."""

    def partial_sum(self) -> dict[str, Any] | None:
        """What was collected since the last release, as plain values."""

    def load_partial_sum(self, state: dict[str, Any]) -> None:
        """Go on from what `partial_sum` returned."""


@dataclass(frozen=True)
class Position:
    """A place between two batches of a run.

    epochs: whole epochs before it. logical: logical batches of the next epoch that had their step. micro: micro-batches
    of the next logical batch; their clipped gradients are in `partial_sum`.
    """

    epochs: int
    logical: int = 0
    micro: int = 0
    partial_sum: dict[str, Any] | None = None


@dataclass(frozen=True)
class MicroBatch:
    """The batch in flight.

    size: its number of rows (records, where each has one), None if that is not known. last: it ends its logical batch.
    stepped: it has had its `optimizer.step()`. collected: so many of its rows are in the sum already. unit_rows: how
    many rows each unit has, one after the other; None where each row is a unit, or where that is not known. drawn:
    units in the whole logical batch, on all ranks; share: those of them that are this rank's; None where that is not
    known.
    """

    size: int | None
    last: bool
    stepped: bool
    collected: int = 0
    unit_rows: tuple[int, ...] | None = None
    drawn: int | None = None
    share: int | None = None

    @property
    def left(self) -> int | None:
        """Rows not yet in the sum, where their number is known."""
        return None if self.size is None else self.size - self.collected

    def units_among(self, rows: int | None) -> tuple[int, ...] | None:
        """Rows of each unit among the next `rows` rows that are not yet in the sum, where that is known. Refuses rows
        that end inside of a unit."""
        if self.unit_rows is None or rows is None:
            return None
        ends = list(itertools.accumulate(self.unit_rows, initial=0))
        end = self.collected + rows
        if end not in ends:
            raise PrivacyError(
                f"a part of {rows} rows of the batch ends inside of a unit: the rows of a unit (its views, or the "
                f"records of its id) are averaged before the clip, so they must be in one part. {self.left} rows are "
                f"left, and the first unit among them has {self.unit_rows[ends.index(self.collected)]}"
            )
        return self.unit_rows[ends.index(self.collected) : ends.index(end)]


_ANY_BATCH = MicroBatch(size=None, last=True, stepped=False)  # not from the loader: a logical batch of its own
_NO_BATCH = MicroBatch(size=None, last=False, stepped=True)  # an epoch has begun, its first batch is not out yet


class Clock:
    """Where a run stands. Makes sure that each batch of the loader gets exactly one step.

    `enter_epoch` returns a number that stands for this loop over the loader; the other calls of the loop pass it back,
    so that a loop that a newer one has ended is told from it.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.epochs_done = 0
        self.done = (0, 0)  # of the epoch under way: logical batches that had their step, micro-batches of the next
        self.batch = _ANY_BATCH
        self.loaded: Position | None = None  # in the middle of an epoch, until a loop over the loader goes on from it
        self._loop: int | None = None  # the loop over the loader that is under way
        self._loops = 0  # begun so far
        self._begun = False  # whether this epoch had a step, or part of one, whatever became of it

    # -- moved by the loader -----------------------------------------------------------------------------------------
    def enter_epoch(self) -> int:
        """Begin a loop over the loader, at the loaded position if there is one. Ends the loop that was under way: what
        it had summed up is dropped; none of it was released."""
        if self._loop is not None:
            self.leave_epoch(self._loop)
        self._loops += 1
        self._loop, self.batch, self.done, self._begun = self._loops, _NO_BATCH, (0, 0), self.loaded is not None
        self._gradients.forget_sum()
        self._gradients.drop_pending()
        self._gradients.renew()
        if self.loaded is not None:
            self.done = self.loaded.logical, self.loaded.micro
            if self.loaded.partial_sum is not None:
                self._gradients.load_partial_sum(self.loaded.partial_sum)
            self.loaded = None
        return self._loop

    def begin_micro_batch(
        self,
        loop: int,
        *,
        size: int,
        last: bool,
        unit_rows: tuple[int, ...] | None = None,
        drawn: int | None = None,
        share: int | None = None,
        filler: bool = False,
    ) -> None:
        """A micro-batch of `size` rows goes out; `last` says that it ends its logical batch. unit_rows: how many of
        the rows are each unit's; None where each row is a unit. drawn: units in the whole logical batch. share: this
        rank's of them. filler: nothing of its rows is to be kept."""
        self.check_stepped(loop)
        self._gradients.renew()
        self._gradients.note_filler(filler)
        self.batch = MicroBatch(size=size, last=last, stepped=False, unit_rows=unit_rows, drawn=drawn, share=share)

    def check_stepped(self, loop: int) -> None:
        """Refuse to go on: to the next micro-batch, or past the end of the epoch, before the last one had its step."""
        if loop != self._loop:
            raise PrivacyError("a newer epoch of the loader has begun: iterate over it once at a time")
        if not self.batch.stepped:
            raise PrivacyError(
                "the loader was asked for the next batch before optimizer.step() of the optimizer that make_private "
                "returned: every batch of the loader needs one step, or the steps taken and the steps accounted for "
                "would differ. lsg accumulates by itself; use max_physical_batch_size for large batches, and a "
                "DataLoader of your own to look at the data"
            )

    def check_whole(self, loop: int) -> None:
        """Refuse to go on to the next logical batch before all micro-batches of this one were handed out."""
        if loop == self._loop and not self.batch.last:
            raise PrivacyError(
                "the loader was asked for the next logical batch before all micro-batches of the last one had their "
                "turn: the records in the others would be left out of their step"
            )

    def leave_epoch(self, loop: int) -> bool:
        """No batch of this loop is in flight any more: a step taken now is a step of its own. An epoch without any
        step does not count. Returns whether it was the loop under way."""
        if loop != self._loop:
            return False
        self.epochs_done += self._begun
        self._loop, self.batch = None, _ANY_BATCH
        self._gradients.note_filler(False)
        self._gradients.forget_sum()
        return True

    # -- read by the optimizer, which reports its steps --------------------------------------------------------------
    @property
    def epoch(self) -> int | None:
        """The number of the epoch under way, counted from 0; None outside of a loop over the loader."""
        return None if self._loop is None else self.epochs_done

    @property
    def batch_in_flight(self) -> MicroBatch | None:
        """The batch of the loader that the next gradients belong to, another object after each part; None outside."""
        return None if self.batch.size is None or self.batch.stepped else self.batch

    @property
    def next_place(self) -> tuple[int, int, int]:
        """Where the next loop over the loader begins: its epoch, logical batches and micro-batches done in it."""
        if self.loaded is not None:
            return self.loaded.epochs, self.loaded.logical, self.loaded.micro
        return self.epochs_done, 0, 0

    def step_begins(self) -> None:
        """From now on the epoch counts, whatever becomes of the step."""
        self._begun = True

    def part_collected(self, size: int) -> None:
        """So many more rows of the batch in flight are in the sum."""
        self.batch = replace(self.batch, collected=self.batch.collected + size)

    def batch_stepped(self) -> None:
        """The batch in flight has had its step. One from elsewhere than the loader moves nothing."""
        if self._loop is not None and not self.batch.stepped:
            logical, micro = self.done
            self.done = (logical + 1, 0) if self.batch.last else (logical, micro + 1)
            self.batch = replace(self.batch, stepped=True)

    # -- saved and loaded --------------------------------------------------------------------------------------------
    def position(self) -> Position:
        """Where the run stands. There must be no batch under way."""
        if self.loaded is not None:
            return self.loaded
        if self._gradients.pending() or (self._loop is not None and not self.batch.stepped):
            raise PrivacyError("a batch is under way: save the state after its optimizer.step()")
        if self._loop is None:
            return Position(self.epochs_done)
        return Position(self.epochs_done, *self.done, self._gradients.partial_sum())

    def check_idle(self) -> None:
        """Refuse to be moved elsewhere while the loader or a batch counts on the present position."""
        if self._loop is not None or self._gradients.pending():
            raise PrivacyError("a loop over the loader or a batch is under way: load a state before or after it")

    def load(self, position: Position) -> None:
        """Go on from there; the next loop over the loader finishes the epoch that was under way."""
        self._gradients.forget_sum()
        self.epochs_done, self._loop, self.batch, self.done = position.epochs, None, _ANY_BATCH, (0, 0)
        self.loaded = position if position.logical or position.micro else None
