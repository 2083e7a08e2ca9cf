"""Columns of lists of words in little memory: lists in one by one, or in Arrow's arrays, sequences of lists out."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from lsg.tasks.packed import Rows, WordColumn

T = TypeVar("T")


class PackedLists(Sequence[list[T]], Generic[T]):
    """Lists of values that repeat: `distinct` has each once, and `codes` of all lists a small number for each value.
    Taking some of the lists copies none."""

    def __init__(self, distinct: Sequence[T], codes: NDArray[np.int32], starts: Rows, ends: Rows) -> None:
        self._distinct, self._codes, self._starts, self._ends = distinct, codes, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> list[T]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[T]]: ...
    def __getitem__(self, index: int | slice) -> list[T] | list[list[T]]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return [self._distinct[code] for code in self._codes[self._starts[index] : self._ends[index]]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def take(self, rows: Rows) -> "PackedLists[T]":
        return PackedLists(self._distinct, self._codes, self._starts[rows], self._ends[rows])


class ListColumn(Sequence[Any]):
    """Lists, and at single rows what is none. `distinct` has each value of them once, which first appears in the list
    of the row `first`."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._items, self._ends = WordColumn(), array("q")
        self._others: dict[int, Any] = {}
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: Any) -> Any:
        start = self._ends[row - 1] if row else 0
        return self._others.get(row, [self._items[place] for place in range(start, self._ends[row])])

    @property
    def distinct(self) -> list[Any]:
        return self._items.distinct

    @property
    def first(self) -> list[int]:
        return [bisect_right(self._ends, place) for place in self._items.first]

    @property
    def lengths(self) -> Rows:
        """Of each list. The column must not grow after this."""
        ends = np.frombuffer(self._ends, dtype=np.int64)
        return ends - np.concatenate([[0], ends[:-1]])

    @property
    def no_lists(self) -> dict[int, Any]:
        """By row, what stands there in place of a list."""
        return self._others

    def append(self, value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                self._items.append(item)
        else:
            self._others[len(self._ends)] = value
        self._ends.append(len(self._items))

    def extend_arrow(self, values: Any) -> None:
        """values: an array of Arrow's."""
        for value in values:
            self.append(value.as_py())

    def lists(self, distinct: Sequence[T]) -> PackedLists[T]:
        """distinct: what stands for each of `self.distinct`. The column must not grow after this."""
        ends = np.frombuffer(self._ends, dtype=np.int64)
        return PackedLists(distinct, self._items.codes, ends - self.lengths, ends)
