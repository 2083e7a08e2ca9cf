"""Units: who is added or removed when two data sets are neighbours, and which rows of a batch are whose.

By default a unit is one record, which is one row of what the model gets. `views=K`: a record is K rows, adjacent.
`unit_of=ids`: all records with the same id are one unit; units are drawn for a step, and their records come with them.
"""

import hashlib
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from lsg.errors import ConfigurationError
from lsg.sampling.random_sources import NoiseSource


class Units:
    """The units of a data set.

    views: rows of each record. numbers: the unit of each record, counted from 0 as the ids come up; None where each
    record is a unit. max_records: the most records of a unit that enter one step, chosen anew for each; None for all.
    """

    def __init__(self, *, views: int = 1, numbers: Sequence[int] | None = None, max_records: int | None = None) -> None:
        self.views, self.max_records = views, max_records
        self._numbers = numbers
        self._records: list[list[int]] = []  # of each unit
        for record, unit in enumerate(numbers or ()):
            if unit == len(self._records):
                self._records.append([])
            self._records[unit].append(record)

    @property
    def named(self) -> bool:
        """Whether units are the records of one id each."""
        return self._numbers is not None

    @property
    def several_rows(self) -> bool:
        """Whether a unit may have more rows than one."""
        return self.named or self.views > 1

    def count(self, records: int) -> int:
        """How many units a data set of so many records has."""
        return len(self._records) if self.named else records

    def most_rows(self) -> int:
        """Rows of the largest unit in a step."""
        most = max(map(len, self._records)) if self.named else 1
        return self.views * (most if self.max_records is None else min(most, self.max_records))

    def records_of(self, unit: int, source: NoiseSource) -> list[int]:
        """Numbers of the records with which a unit enters a step. source: for the choice, where not all may."""
        if not self.named:
            return [unit]
        records = self._records[unit]
        if self.max_records is None or len(records) <= self.max_records:
            return records
        return [records[i] for i in sorted(source.permutation(len(records))[: self.max_records].tolist())]

    def unit_rows(self, records: Sequence[int]) -> tuple[int, ...] | None:
        """Rows of each unit in a micro-batch of these records, where those of a unit are adjacent. None where each row
        is a unit."""
        if self._numbers is None:
            return (self.views,) * len(records) if self.views > 1 else None
        numbers = self._numbers
        return tuple(self.views * len(list(own)) for _, own in itertools.groupby(numbers[record] for record in records))

    def fingerprint(self) -> str | None:
        """Of which records belong together; None where each record is a unit."""
        if self._numbers is None:
            return None
        return hashlib.sha256(torch.tensor(self._numbers, dtype=torch.int64).numpy().tobytes()).hexdigest()


def make_units(records: int, *, views: Any, unit_of: Any, max_records_per_unit: Any) -> Units:
    """What `make_private` was given in, for a data set of so many records; the units out, or a refusal."""
    for name, value in (("views", views), ("max_records_per_unit", max_records_per_unit)):
        if not (type(value) is int and value >= 1) and (name == "views" or value is not None):
            raise ConfigurationError(f"{name}={value!r} must be a whole number > 0")
    if unit_of is None:
        if max_records_per_unit is not None:
            raise ConfigurationError(
                f"max_records_per_unit={max_records_per_unit} needs unit_of: without it each record is a unit"
            )
        return Units(views=views)
    return Units(views=views, numbers=_numbers(records, unit_of), max_records=max_records_per_unit)


def _numbers(records: int, unit_of: Any) -> list[int]:
    """The ids as numbers, counted from 0 as they come up."""
    try:
        ids: list[Hashable] = [_plain(name) for name in _plain(unit_of)]
    except TypeError:
        raise ConfigurationError(f"unit_of is a {type(unit_of).__name__}; it must be a sequence of ids") from None
    if len(ids) != records:
        raise ConfigurationError(f"the data set has {records} records, but unit_of has {len(ids)} ids: one a record")
    found: dict[Hashable, int] = {}
    numbers = []
    for record, name in enumerate(ids):
        if name is None or (isinstance(name, float) and math.isnan(name)):
            raise ConfigurationError(
                f"unit_of: record {record} has the id {name}: give an id to every record, one of its own if it "
                "belongs to nobody else"
            )
        # Objects without a hash of their own are equal to none but themselves: each would be taken for another unit.
        if not isinstance(name, Hashable) or type(name).__hash__ is object.__hash__:
            raise ConfigurationError(
                f"unit_of: the id of record {record} is a {type(name).__name__}, which cannot be compared by value: "
                "ids must be hashable, numbers or strings for example"
            )
        numbers.append(found.setdefault(name, len(found)))
    return numbers


def _plain(value: Any) -> Any:
    """NumPy's and torch's numbers and arrays as Python's own: a tensor's hash is not that of its value."""
    return value.tolist() if hasattr(value, "tolist") else value


def pack_units(
    units: Sequence[Sequence[int]],
    views: int,
    *,
    max_rows: int | None,
    lengths: torch.Tensor | None,
    max_tokens: int | None,
) -> list[list[int]]:
    """Records of the units that were drawn in; micro-batches out, each unit whole in one of them, its records adjacent.

    A micro-batch has at most `max_rows` rows, and `max_tokens` tokens (rows times the longest record) as long as it has
    several units. Units of like length come together, where lengths are known.
    """
    longest = [1 if lengths is None else int(lengths[list(records)].max()) for records in units]
    order = (
        range(len(units))
        if lengths is None
        else sorted(range(len(units)), key=longest.__getitem__, reverse=max_tokens is not None)
    )
    batches: list[list[int]] = []
    length = 0  # of the longest record in the last micro-batch
    for unit in order:
        if batches:
            rows = views * (len(batches[-1]) + len(units[unit]))
            length = max(length, longest[unit])
            fits = (max_rows is None or rows <= max_rows) and (max_tokens is None or rows * length <= max_tokens)
        if not batches or not fits:
            batches.append([])
            length = longest[unit]
        batches[-1] += units[unit]
    return batches
