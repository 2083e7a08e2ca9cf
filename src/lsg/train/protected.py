"""Whom a run protects: each record by itself, or with --unit-column all records of each person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lsg.train.config import RunConfig

if TYPE_CHECKING:
    from lsg.tasks.encoded import Encoded

RECORDS_OF_A_PERSON = 8  # in one step, where --max-records-per-unit is not given


@dataclass(frozen=True)
class Protected:
    """records: of the training data. persons: the id of the person that each of them is of; None where each record is
    protected by itself. most: so many records of a person enter a step."""

    records: int
    persons: list[str] | None = None
    most: int | None = None

    @property
    def units(self) -> int:
        """How many persons, or else records, there are: N of the sampling, of δ and of ε."""
        return self.records if self.persons is None else len(set(self.persons))

    @property
    def noun(self) -> str:
        return "record" if self.persons is None else "person"

    @property
    def counted(self) -> str:
        """In words, how many there are."""
        return f"{self.records:,} records" + ("" if self.persons is None else f" of {self.units:,} persons")


def whom_it_protects(config: RunConfig, train: Encoded, persons: list[str] | None) -> Protected:
    """persons: as the data have them. Non-private training protects nobody, and draws records."""
    if persons is None or config.method == "non-private":
        return Protected(len(train))
    return Protected(len(train), persons, config.max_records_per_unit or RECORDS_OF_A_PERSON)
