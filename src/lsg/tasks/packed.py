"""Columns of a table in little memory: values in one by one, or in Arrow's arrays, sequences of them out.

A Python string takes 50 bytes and more beside its own. Here the texts of a column are one buffer with two numbers a
text, and words that repeat (labels, ids of persons) one small number a row.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class PackedTexts(Sequence[str]):
    """Texts in one buffer, in UTF-8. Taking some of them copies no text."""

    def __init__(self, buffer: bytes | bytearray, starts: Rows, ends: Rows) -> None:
        self._buffer, self._starts, self._ends = buffer, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self._buffer[self._starts[index] : self._ends[index]].decode()

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[str]) -> list[str]:
        return [*self, *other]

    def take(self, rows: Rows) -> "PackedTexts":
        return PackedTexts(self._buffer, self._starts[rows], self._ends[rows])


class TextColumn(Sequence[Any]):
    """Texts, and at single rows what is none: nothing, or a number that stands where a text should."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._buffer, self._starts, self._ends = bytearray(), array("q"), array("q")
        self._others: dict[int, Any] = {}
        self._dictionary: Any = None  # Arrow's of the last array, and where its texts stand
        self._places: tuple[Rows, Rows] | None = None
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: Any) -> Any:
        if row in self._others:
            return self._others[row]
        return self._buffer[self._starts[row] : self._ends[row]].decode()

    def append(self, value: Any) -> None:
        self._starts.append(len(self._buffer))
        if isinstance(value, str):
            self._buffer += value.encode()
        else:
            self._others[len(self._starts) - 1] = value
        self._ends.append(len(self._buffer))

    def extend_arrow(self, values: Any) -> None:
        """values: an array of Arrow's. Where it has a dictionary, each text of that is kept once."""
        if str(values.type) == "string" and not values.null_count and len(values):
            self._extend(values)
            return
        if not hasattr(values, "dictionary") or values.null_count or values.dictionary.null_count:
            for value in values:
                self.append(value.as_py())
            return
        if self._places is None or not values.dictionary.equals(self._dictionary):
            self._dictionary, self._places = values.dictionary, self._added(values.dictionary)
        rows = values.indices.to_numpy(zero_copy_only=False)
        for store, places in zip((self._starts, self._ends), self._places, strict=True):
            store.frombytes(places[rows].tobytes())

    def _extend(self, values: Any) -> None:
        """As Arrow has them: numbers where each text ends, and one buffer."""
        _, numbers, content = values.buffers()
        ends = np.frombuffer(numbers, dtype=np.int32, count=values.offset + len(values) + 1)[values.offset :]
        places = ends.astype(np.int64) - ends[0] + len(self._buffer)
        if content is not None:
            self._buffer += memoryview(content)[ends[0] : ends[-1]]
        self._starts.frombytes(places[:-1].tobytes())
        self._ends.frombytes(places[1:].tobytes())

    def _added(self, texts: Any) -> tuple[Rows, Rows]:
        ends = array("q", [len(self._buffer)])
        for text in texts:
            self._buffer += text.as_buffer()
            ends.append(len(self._buffer))
        places = np.frombuffer(ends, dtype=np.int64)
        return places[:-1], places[1:]

    def texts(self) -> PackedTexts:
        """What is no text is an empty one. The column must not grow after this."""
        return PackedTexts(
            self._buffer, np.frombuffer(self._starts, dtype=np.int64), np.frombuffer(self._ends, dtype=np.int64)
        )


class WordColumn(Sequence[Any]):
    """Values that repeat: `distinct` has each once, in the order in which they first appear, at the rows `first`."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.distinct: list[Any] = []
        self.first: list[int] = []
        self._known: dict[tuple[type, Any], int] = {}
        self._codes = array("i")
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, row: Any) -> Any:
        return self.distinct[self._codes[row]]

    @property
    def codes(self) -> NDArray[np.int32]:
        """Of each row, the place of its value in `distinct`. The column must not grow after this."""
        return np.frombuffer(self._codes, dtype=np.int32)

    def append(self, value: Any) -> None:
        self._codes.append(self._code(value, len(self._codes)))

    def extend_arrow(self, values: Any) -> None:
        if not hasattr(values, "dictionary") or values.null_count or values.dictionary.null_count:
            for value in values:
                self.append(value.as_py())
            return
        rows = values.indices.to_numpy(zero_copy_only=False)
        used, first = np.unique(rows, return_index=True)
        codes = np.zeros(len(values.dictionary), dtype=np.int32)
        for place, row in sorted(zip(used.tolist(), first.tolist(), strict=True), key=lambda found: found[1]):
            codes[place] = self._code(values.dictionary[place].as_py(), len(self._codes) + row)
        self._codes.frombytes(codes[rows].tobytes())

    def _code(self, value: Any, row: int) -> int:
        key = (type(value), value if value.__hash__ else repr(value))
        code = self._known.setdefault(key, len(self.distinct))
        if code == len(self.distinct):
            self.distinct.append(value)
            self.first.append(row)
        return code
