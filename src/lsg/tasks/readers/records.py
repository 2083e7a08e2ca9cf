"""From a table to labelled texts, or to documents: every text is one, every label is known and every person has an id,
or the row that is wrong is named.

How many classes there are, and their names, is taken to be public: it is read from the data and no noise covers it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lsg.errors import ConfigurationError
from lsg.files.foreign_text import visible
from lsg.tasks.data import Documents, Texts
from lsg.tasks.packed import PackedTexts
from lsg.tasks.packed_lists import ListColumn
from lsg.tasks.readers.tables import Table

MAX_CLASSES = 1000  # more are not classes but numbers or texts


def texts_of(table: Table, labels: Sequence[str], *, pair_may_be_empty: bool = False) -> Texts:
    """labels: as they stand in the table, the first one's class being 0."""
    pair = table.columns.pair
    texts = _checked(table, table.columns.text)
    pairs = None if pair is None else _checked(table, pair, may_be_empty=pair_may_be_empty)
    classes = torch.tensor(label_numbers(table, labels), dtype=torch.int64)
    codes = torch.from_numpy(table.values[label_column(table)].codes.copy())
    return Texts(texts, pairs, classes[codes], persons_of(table))


def documents_of(table: Table) -> Documents:
    """A prompt may be empty, a text may not."""
    prompt = table.columns.prompt
    return Documents(
        _checked(table, table.columns.text),
        None if prompt is None else _checked(table, prompt, may_be_empty=True),
        persons_of(table),
    )


def label_names(table: Table) -> tuple[str, ...]:
    """The distinct labels: numbers in numeric, words in alphabetic order."""
    names = set(_words(table, label_column(table), "label"))
    if not 2 <= len(names) <= MAX_CLASSES:
        raise ConfigurationError(
            f"{table.source}: column '{label_column(table)}' holds {len(names):,} different labels in "
            f"{len(table.numbers):,} rows; between 2 and {MAX_CLASSES:,} can be learnt"
        )
    return tuple(sorted(names, key=int) if all(_is_integer(name) for name in names) else sorted(names))


def _checked(table: Table, column: str, *, may_be_empty: bool = False) -> PackedTexts:
    values = table.values[column]
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, str):
            raise ConfigurationError(f"{table.place(row)}: '{column}' is {short(value)}, not a text")
        if not may_be_empty and (value is None or not value.strip()):
            raise ConfigurationError(f"{table.place(row)}: '{column}' is empty")
    texts: PackedTexts = values.texts()
    return texts


def label_numbers(table: Table, labels: Sequence[str]) -> list[int]:
    """The class of each distinct label of the table's column."""
    known = {label: number for number, label in enumerate(labels)}
    column, classes = label_column(table), []
    for word, row in zip(_words(table, column, "label"), table.values[column].first, strict=True):
        if word not in known:
            raise ConfigurationError(f"{table.place(row)}: label '{visible(word, 80)}' is not one of {_some(labels)}")
        classes.append(known[word])
    return classes


def label_column(table: Table) -> str:
    assert table.columns.label is not None
    return table.columns.label


def persons_of(table: Table) -> list[str] | None:
    column = table.columns.person
    if column is None:
        return None
    words = _words(table, column, "the id")
    return [words[code] for code in table.values[column].codes]


def _words(table: Table, column: str, what: str) -> list[str]:
    """Distinct labels or ids as words, whatever the format: those without types write the number 1 as "1".

    what: for errors.
    """
    words = []
    for value, row in zip(table.values[column].distinct, table.values[column].first, strict=True):
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a column of integers that lacks one somewhere becomes one of floats
        word = str(value).lower() if isinstance(value, bool) else str(value).strip()
        if value is None or not word or word == "nan":
            how = "holds an empty one" if isinstance(table.values[column], ListColumn) else "is empty"
            raise ConfigurationError(f"{table.place(row)}: '{column}' {how}")
        if not isinstance(value, (str, int)):
            raise ConfigurationError(f"{table.place(row)}: {what} {short(value)} is neither an integer nor a word")
        words.append(word)
    return words


def _is_integer(name: str) -> bool:
    return name.removeprefix("-").isdecimal()


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _some(names: Sequence[str], limit: int = 10) -> str:
    return ", ".join(visible(name, 80) for name in names[:limit]) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )
