"""Anyone's words with tags: what `lsg.tasks.readers.text` takes, a list of words and a list of tags in each record.

Which tags there are is taken to be public, as classes are.
"""

from collections.abc import Sequence
from dataclasses import replace

from lsg.errors import ConfigurationError
from lsg.files.foreign_text import is_text, visible
from lsg.tasks.data import Tagged, TaskData
from lsg.tasks.packed_lists import ListColumn
from lsg.tasks.readers.columns import WantedTags
from lsg.tasks.readers.parts import read_parts
from lsg.tasks.readers.records import label_column, label_names, label_numbers, persons_of, short
from lsg.tasks.readers.tables import Table
from lsg.tasks.split import hold_out


def read_tagged(data: str, wanted: WantedTags) -> TaskData:
    found = read_parts(data, wanted)
    columns = found.training.columns
    _check_lists(found.training)
    names = label_names(found.training)
    training = _tagged_of(found.training, names)
    if found.evaluation is None:
        held = hold_out(training, names, found.source)
    else:
        _check_lists(found.evaluation)
        held = TaskData(training, {found.part: _tagged_of(found.evaluation, names)}, names, found.source)
    words, tags = (visible(name, 80) for name in (columns.text, label_column(found.training)))
    return replace(held, columns=f"words of the column '{words}' with tags of '{tags}'")


def _check_lists(table: Table) -> None:
    """Every record has a list of words and one of as many tags."""
    words, tags = table.values[table.columns.text], table.values[label_column(table)]
    for name, values in ((table.columns.text, words), (label_column(table), tags)):
        for row, value in values.no_lists.items():
            what = "empty" if value is None else f"{short(value)}, not a list"
            raise ConfigurationError(f"{table.place(row)}: '{name}' is {what}")
    for row, (count, other) in enumerate(zip(words.lengths.tolist(), tags.lengths.tolist(), strict=True)):
        if count != other:
            raise ConfigurationError(
                f"{table.place(row)}: {count:,} words in '{table.columns.text}' and {other:,} tags in "
                f"'{label_column(table)}', where each word has one"
            )
        if not count:
            raise ConfigurationError(f"{table.place(row)}: '{table.columns.text}' is an empty list")


def _tagged_of(table: Table, names: Sequence[str]) -> Tagged:
    words, tags = table.values[table.columns.text], table.values[label_column(table)]
    assert isinstance(words, ListColumn) and isinstance(tags, ListColumn)
    for word, row in zip(words.distinct, words.first, strict=True):
        if not isinstance(word, str):
            raise ConfigurationError(f"{table.place(row)}: the word {short(word)} is not a text")
        if not is_text(word):
            raise ConfigurationError(f"{table.place(row)}: a word holds half a character (a lone surrogate)")
    return Tagged(words.lists(words.distinct), tags.lists(label_numbers(table, names)), persons_of(table))
