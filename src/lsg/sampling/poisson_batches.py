"""Draws the units of each step (records, by default) by Poisson sampling, and cuts them into micro-batches.

A logical batch is what one noisy step is computed from. All ranks draw the same one; each hands out its own share of
it, as micro-batches that fit into memory.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

from lsg.distributed.group import Group
from lsg.errors import ConfigurationError, PrivacyError
from lsg.perf import grid_size
from lsg.sampling.plan import SamplingPlan
from lsg.sampling.random_sources import NoiseSource
from lsg.sampling.shares import shares
from lsg.sampling.units import Units, pack_units

Micro = list[int]  # numbers of records
Logical = list[Micro]  # empty if no record was drawn


class Filler(Micro):
    """A micro-batch of the first record, for a rank whose share is done while others still compute: where weights are
    sharded, all ranks must run as many forwards. Nothing of it is kept, so that it matters to nobody that the record is
    the same one each time and was not drawn."""


class LogicalBatches(Sampler[Micro]):
    """A batch sampler for DataLoader: yields the micro-batches of an epoch; `epoch` holds them by logical step."""

    def __init__(
        self,
        plan: SamplingPlan,
        source: NoiseSource,
        max_physical_batch_size: int | None = None,
        lengths: Sequence[int] | torch.Tensor | None = None,
        max_tokens: int | None = None,
        units: Units | None = None,
        group: Group | None = None,
        *,
        in_step: bool = False,
    ) -> None:
        """plan: of units. lengths: of the data set's records. units: which records are one; each by default. group: the
        ranks that share a logical batch. in_step: give all of them as many micro-batches, with fillers."""
        self.units = units or Units()
        if lengths is not None and not self.units.named and len(lengths) != plan.records:
            raise ConfigurationError(f"the data set has {plan.records} records but {len(lengths)} lengths")
        self.plan, self.source = plan, source
        self.max_size: int | None = None
        self._ahead: _DrawnAhead | None = None
        self.limit(max_physical_batch_size)
        self.lengths = None if lengths is None else torch.as_tensor(lengths)
        self.max_tokens = None if lengths is None else max_tokens
        self.epoch: list[Logical] = []
        self.drawn: list[int] = []  # units in each logical batch of `epoch`, on all ranks together
        self.shares: list[int] = []  # this rank's of them
        self.group, self._in_step = group or Group(), in_step
        self._open = False
        # The source's state before the epoch under way was drawn; None where there is no such epoch, or no such state.
        self._before_draw: torch.Tensor | None = None

    def limit(self, max_physical_batch_size: Any) -> None:
        """From the next epoch on micro-batches have at most so many rows; None for whole logical batches."""
        whole = type(max_physical_batch_size) is int and max_physical_batch_size >= 1
        if max_physical_batch_size is not None and not whole:
            raise ConfigurationError(f"max_physical_batch_size={max_physical_batch_size!r} must be a whole number > 0")
        if max_physical_batch_size is not None and self.units.most_rows() > max_physical_batch_size:
            raise _too_large(self.units, max_physical_batch_size)
        self.max_size, self._ahead = max_physical_batch_size, None

    def draw_epoch(self, number: int, logical_done: int = 0, micro_done: int = 0) -> list[Logical]:
        """Draw epoch `number`, at once: a loader's workers ask ahead, and the loop must know where batches end.

        An epoch that is continued leaves out so many logical batches, and micro-batches of the one after them.
        """
        self._before_draw = self.source.state()
        whole = self._take(number)
        self.shares = [sum(map(self._units_in, logical)) for logical in whole[1]][logical_done:]
        self.drawn, self.epoch = _rest(whole, logical_done, micro_done)
        return self.epoch

    def batches_ahead(self, number: int, logical_done: int = 0, micro_done: int = 0) -> int | None:
        """How many micro-batches `draw_epoch` of the same arguments will find; the source stays where it is. None where
        that cannot be known, as drawing is a matter of all ranks."""
        if not self.group.alone and not self.source.replayable:
            return None
        before = self.source.state()
        if self._ahead is None or not self._ahead.follows(number, before):
            drawn = self._draw_whole(number)
            self._ahead = _DrawnAhead(number, before, self.source.state(), drawn)
            if before is not None:
                self.source.load_state(before)
        return sum(map(len, _rest(self._ahead.drawn, logical_done, micro_done)[1]))

    def _take(self, number: int) -> "_Drawn":
        """Draw an epoch, or find the one that was drawn ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not ahead.follows(number, self._before_draw):
            return self._draw_whole(number)
        if ahead.after is not None:
            self.source.load_state(ahead.after)
        return ahead.drawn

    def _draw_whole(self, number: int) -> "_Drawn":
        count = self.plan.first_step(number + 1) - self.plan.first_step(number)
        members_of_all = self._draw(max(1, count))
        return [len(members) for members in members_of_all], [self._split(members) for members in members_of_all]

    def _units_in(self, records: Micro) -> int:
        return 0 if isinstance(records, Filler) else len(self.units.unit_rows(records) or records)

    def epoch_seed(self) -> int:
        """A seed of the epoch drawn last for other purposes; the same when the epoch is drawn again."""
        if self._before_draw is None:
            return secrets.randbits(63)
        return int.from_bytes(hashlib.sha256(self._before_draw.numpy().tobytes()).digest()[:8], "big") >> 1

    def leave_epoch(self) -> None:
        """The epoch drawn last is over: nobody will draw it again."""
        self._before_draw = None

    def state(self) -> torch.Tensor | None:
        """The source's state: as it was before the epoch under way was drawn, so that it can be drawn again; as it is
        where no epoch is under way."""
        return self.source.state() if self._before_draw is None else self._before_draw

    def load_state(self, state: torch.Tensor | None) -> None:
        """Draw the next epoch from there."""
        self.epoch, self._before_draw, self._ahead = [], None, None
        self.source.load_state(state)

    @contextmanager
    def handed_out(self) -> Iterator[None]:
        """While lsg's loader asks for the micro-batches of the epoch drawn last, as often as it likes."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def __iter__(self) -> Iterator[Micro]:
        if not self._open:
            raise PrivacyError(
                "this batch sampler serves the loader that make_private returned and no other: the steps of another "
                "one's batches could not be accounted for. Iterate over that loader itself. With Accelerate "
                "prepare everything first, then call make_private with what came out of it (optimizer.optimizer is the "
                "original), and prepare nothing that it returned. To bound memory give max_physical_batch_size"
            )
        return iter([micro for logical in self.epoch for micro in logical])

    def __len__(self) -> int:
        """Logical steps in an epoch, as expected."""
        return self.plan.steps(1)

    def _draw(self, count: int) -> list[torch.Tensor]:
        records, rate = self.plan.records, self.plan.sample_rate
        if not self.plan.poisson:
            return list(self.source.permutation(records).split(self.plan.expected_batch_size))
        return [(self.source.uniform(records) < rate).nonzero().flatten() for _ in range(count)]

    def _split(self, members: torch.Tensor) -> Logical:
        """This rank's micro-batches of at most `max_size`, of like length where lengths are known (the sum has no
        order)."""
        cut = self._units_of_ranks(members) if self.units.several_rows else self._records_of_ranks(members)
        mine = cut(self.group.rank)
        if not self._in_step:
            return mine
        most = max(len(cut(rank)) for rank in range(self.group.size))
        return mine + [Filler([0])] * (most - len(mine))

    def _records_of_ranks(self, members: torch.Tensor) -> Callable[[int], Logical]:
        """rank -> micro-batches of those of the records drawn that it computes."""
        if self.group.alone:
            return lambda rank: self._cut(members)
        costs = [1] * len(members) if self.lengths is None else self.lengths[members].tolist()
        places = shares(costs, self.group.size)
        return lambda rank: self._cut(members[torch.tensor(places[rank], dtype=torch.int64)])

    def _units_of_ranks(self, members: torch.Tensor) -> Callable[[int], Logical]:
        """The same of units, each with its records."""
        drawn = [self.units.records_of(unit, self.source) for unit in members.tolist()]
        if self.group.alone:
            return lambda rank: self._pack(drawn)
        lengths = self.lengths
        costs = [len(records) if lengths is None else int(lengths[records].sum()) for records in drawn]
        places = shares(costs, self.group.size)
        return lambda rank: self._pack([drawn[place] for place in places[rank]])

    def _cut(self, members: torch.Tensor) -> Logical:
        if len(members) == 0:
            return []
        most = self.max_size or len(members)
        sizes: int | list[int] = most
        if self.lengths is not None:
            by_tokens = self.max_tokens is not None
            members = members[self.lengths[members].argsort(stable=True, descending=by_tokens)]
            sizes = self._sizes(self.lengths[members].tolist(), most) if by_tokens else most
        return [micro.tolist() for micro in members.split(sizes)]

    def _pack(self, drawn: list[list[int]]) -> Logical:
        return pack_units(
            drawn, self.units.views, max_rows=self.max_size, lengths=self.lengths, max_tokens=self.max_tokens
        )

    def _sizes(self, lengths: list[int], most: int) -> list[int]:
        """Of micro-batches with at most `max_tokens` tokens, for records with the longest first.

        All but the last have sizes that need no padding, so that few shapes come up.
        """
        assert self.max_tokens is not None
        sizes: list[int] = []
        start = 0
        while start < len(lengths):
            fitting = max(1, min(most, self.max_tokens // max(1, lengths[start])))
            sizes.append(min(grid_size(fitting), len(lengths) - start))
            start += sizes[-1]
        return sizes


_Drawn = tuple[list[int], list[Logical]]  # units in each logical batch of an epoch, on all ranks; their micro-batches


@dataclass(frozen=True)
class _DrawnAhead:
    """An epoch that somebody wanted to know the length of. before, after: the source's states around its draw."""

    number: int
    before: torch.Tensor | None
    after: torch.Tensor | None
    drawn: _Drawn

    def follows(self, number: int, before: torch.Tensor | None) -> bool:
        """Whether it is what would be drawn now."""
        if before is None or self.before is None:
            return number == self.number and before is self.before
        return number == self.number and torch.equal(before, self.before)


def _rest(whole: _Drawn, logical_done: int, micro_done: int) -> _Drawn:
    """Without so many logical batches, and micro-batches of the one after them."""
    drawn, epoch = whole[0][logical_done:], whole[1][logical_done:]
    if micro_done:
        epoch[0] = epoch[0][micro_done:]
    return drawn, epoch


def _too_large(units: Units, most: int) -> ConfigurationError:
    rows = units.most_rows()
    if units.views > most:
        return ConfigurationError(
            f"max_physical_batch_size={most} counts rows, and with views={units.views} one record has more of them, "
            f"which must be in one micro-batch: use max_physical_batch_size={units.views} or more"
        )
    return ConfigurationError(
        f"the largest unit of unit_of has {rows} rows, and max_physical_batch_size={most} allows fewer: a unit's rows "
        "are averaged before the clip and must be in one micro-batch. Use "
        f"max_records_per_unit={most // units.views} or less, or max_physical_batch_size={rows}"
    )
