"""Tables: a TSV, CSV, JSONL or Parquet file comes in, the chosen columns come out, each row with its line number.

A TSV has no quoting, as GLUE's have none: a quotation mark is a character like any other. A CSV is quoted in the usual
way, so that a text may hold commas and line breaks.
"""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lsg.errors import ConfigurationError, first_line
from lsg.files.foreign_files import open_regular
from lsg.files.foreign_text import is_text, listed
from lsg.files.foreign_values import csv_rows, json_value
from lsg.tasks.packed import TextColumn, WordColumn
from lsg.tasks.packed_lists import ListColumn
from lsg.tasks.readers.columns import Columns, Wanted, WantedTags
from lsg.tasks.readers.files import text_lines
from lsg.tasks.readers.progress import Reading

ROWS_AT_ONCE, BYTES_AT_ONCE = 1 << 14, 1 << 20  # of a Parquet file
LEAST_OF_A_TEXT = 4  # bytes that Parquet writes of a text's length alone; its number in a dictionary takes fewer


@dataclass(frozen=True)
class Table:
    """The chosen columns of one file or hub split, as they stand there.

    values: by column's name, a TextColumn of texts, a WordColumn of labels and ids, a ListColumn of lists.
    numbers: where each row is found, counted in `unit`s from 1.
    """

    source: str
    columns: Columns
    values: dict[str, Any]
    numbers: Sequence[int]
    unit: str = "line"

    def __post_init__(self) -> None:
        if not self.numbers:
            raise ConfigurationError(f"{self.source}: no rows")

    def place(self, row: int) -> str:
        """For errors: where a person finds this row."""
        return f"{self.source}, {self.unit} {self.numbers[row]}"


def read_table(path: Path, wanted: Wanted) -> Table:
    """By the file's suffix, one of FORMATS."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"{path}: '{path.suffix}' is not one of {', '.join(FORMATS)}")
    return FORMATS[path.suffix.lower()](path, wanted)


def read_tsv(path: Path, wanted: Wanted) -> Table:
    lines = enumerate(text_lines(path), 1)
    return _delimited(path, ((number, line.rstrip("\r\n").split("\t")) for number, line in lines), wanted)


def read_csv(path: Path, wanted: Wanted) -> Table:
    return _delimited(path, _csv_rows(path), wanted)


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        yield from csv_rows(text_lines(path, newline=""))
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{path}, {error}") from None


def _delimited(path: Path, rows: Iterable[tuple[int, list[str]]], wanted: Wanted) -> Table:
    """rows: the line number and the fields of the header, then of each row."""
    if isinstance(wanted, WantedTags):
        raise ConfigurationError(f"{path}: its fields hold no lists of words and tags; give JSON Lines or Parquet")
    remaining = iter(rows)
    header = [name.strip() for name in next(remaining)[1]]
    columns = wanted.among(header, str(path))
    for name in columns.names:
        if header.count(name) > 1:
            raise ConfigurationError(f"{path}, line 1: the header names the column '{name}' twice")
    values = _stores(columns)
    stores = [(header.index(name), values[name]) for name in columns.names]
    numbers = array("I")
    for number, fields in remaining:
        if len(fields) != len(header):
            raise ConfigurationError(
                f"{path}, line {number}: {len(fields)} fields, where the header has {len(header)}: a row cut short, or "
                "a line break or separator within a text"
            )
        for position, store in stores:
            store.append(fields[position])
        numbers.append(number)
    return Table(str(path), columns, values, numbers)


def _stores(columns: Columns) -> dict[str, Any]:
    return {name: store_of(columns, name)() for name in columns.names}


def store_of(columns: Columns, name: str) -> type[TextColumn] | type[WordColumn] | type[ListColumn]:
    """What holds the column of this name."""
    if columns.are_lists and name in (columns.text, columns.label):
        return ListColumn
    return TextColumn if name in columns.texts else WordColumn


def read_jsonl(path: Path, wanted: Wanted) -> Table:
    """One JSON object a line. The first one's keys are the columns; each line must have those that are chosen."""
    values: dict[str, Any] = {}
    numbers = array("I")
    for number, line in enumerate(text_lines(path), 1):
        try:
            row = json_value(line)
        except ValueError as error:
            raise ConfigurationError(f"{path}, line {number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise ConfigurationError(f"{path}, line {number}: not a JSON object such as {{'text': ..., 'label': ...}}")
        if not numbers:
            columns = wanted.among(list(row), str(path))
            values = _stores(columns)
        for name, store in values.items():
            if name not in row:
                raise ConfigurationError(f"{path}, line {number}: no '{name}'; it has {listed(row)}")
            if isinstance(row[name], str) and not is_text(row[name]):
                raise ConfigurationError(f"{path}, line {number}: '{name}' holds half a character (a lone surrogate)")
            store.append(row[name])
        numbers.append(number)
    return Table(str(path), columns, values, numbers)


def read_parquet(path: Path, wanted: Wanted) -> Table:
    """Some rows at a time. A text that a column repeats is kept once, as in the file."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigurationError(f"{path}: Parquet needs pyarrow: pip install 'pyarrow>=14.0.1'") from None
    if not os.path.getsize(path):
        raise ConfigurationError(f"{path}: the file is empty")
    try:
        with open_regular(path) as opened:
            return _parquet_table(path, opened, wanted)
    except ConfigurationError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise ConfigurationError(f"{path}: not a readable Parquet file ({first_line(error)})") from None


def _parquet_table(path: Path, opened: IO[bytes], wanted: Wanted) -> Table:
    import pyarrow
    from pyarrow import parquet, types

    file = parquet.ParquetFile(opened, pre_buffer=False, buffer_size=BYTES_AT_ONCE)
    names = file.schema_arrow.names
    columns = wanted.among(names, str(path))
    for name in columns.names:
        if names.count(name) > 1:
            raise ConfigurationError(f"{path}: two columns are named '{name}'")
    texts = [name for name in columns.names if types.is_string(file.schema_arrow.field(name).type)]
    repeating = [name for name in texts if _is_repeated(file.metadata, name)]
    file = parquet.ParquetFile(opened, pre_buffer=False, buffer_size=BYTES_AT_ONCE, read_dictionary=repeating)
    rows = file.metadata.num_rows
    values, reading, done = _stores(columns), Reading(f"reading {path.name}", rows), 0
    for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns.names, use_threads=False):
        batch.validate(full=True)  # a damaged file may be of the right form and hold texts that are not UTF-8
        for name in columns.names:
            values[name].extend_arrow(batch.column(name))
        done += len(batch)
        pyarrow.default_memory_pool().release_unused()  # it keeps what it has freed, for itself
        reading.at(done)
    reading.end()
    if done != rows:
        raise ConfigurationError(f"{path}: {done:,} rows, where its end says {rows:,}")
    return Table(str(path), columns, values, range(1, rows + 1), unit="row")


def _is_repeated(metadata: Any, column: str) -> bool:
    """Whether the file holds each text of the column once, with a number for each row: a text may stand in it once and
    come a million times. Other columns take no more memory than their pages."""
    for group in range(metadata.num_row_groups):
        chunks = (metadata.row_group(group).column(place) for place in range(metadata.num_columns))
        chunk = next((chunk for chunk in chunks if chunk.path_in_schema == column), None)
        if chunk is None or not chunk.has_dictionary_page:
            return False
        dictionary = chunk.data_page_offset - chunk.dictionary_page_offset
        is_most = 2 * dictionary > chunk.total_compressed_size
        if not is_most and chunk.total_uncompressed_size >= LEAST_OF_A_TEXT * chunk.num_values:
            return False
    return True


FORMATS: dict[str, Callable[[Path, Wanted], Table]] = {
    ".tsv": read_tsv,
    ".csv": read_csv,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
