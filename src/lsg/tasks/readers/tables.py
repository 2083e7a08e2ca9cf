"""Tables: a TSV, CSV, JSONL or Parquet file comes in, the chosen columns come out, each row with its line number.

A TSV has no quoting, as GLUE's have none: a quotation mark is a character like any other. A CSV is quoted in the usual
way, so that a text may hold commas and line breaks.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError, first_line
from lsg.files.strict_json import loads
from lsg.tasks.readers.columns import Columns, WantedColumns, listed
from lsg.tasks.readers.files import read_bytes, read_text


@dataclass(frozen=True)
class Table:
    """The text, pair and label columns of one file or hub split, as they stand there.

    numbers: where each row is found, counted in `unit`s from 1.
    """

    source: str
    columns: Columns
    values: dict[str, list[Any]]
    numbers: Sequence[int]
    unit: str = "line"

    def __post_init__(self) -> None:
        if not self.numbers:
            raise ConfigurationError(f"{self.source}: no rows")

    def place(self, row: int) -> str:
        """For errors: where a person finds this row."""
        return f"{self.source}, {self.unit} {self.numbers[row]}"


def read_table(path: Path, wanted: WantedColumns) -> Table:
    """By the file's suffix, one of FORMATS."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"{path}: '{path.suffix}' is not one of {', '.join(FORMATS)}")
    return FORMATS[path.suffix.lower()](path, wanted)


def read_tsv(path: Path, wanted: WantedColumns) -> Table:
    # Not splitlines(), which also breaks at characters that occur within texts, such as U+2028.
    lines = read_text(path).replace("\r\n", "\n").split("\n")
    return _delimited(path, ((number, line.split("\t")) for number, line in enumerate(lines, 1)), wanted)


def read_csv(path: Path, wanted: WantedColumns) -> Table:
    return _delimited(path, _csv_rows(path), wanted)


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    number = 1  # of the line that a row starts at; a quoted text may go on for several
    try:
        for fields in reader:
            yield number, fields
            number = reader.line_num + 1
    except csv.Error as error:
        raise ConfigurationError(f"{path}, line {number}: not valid CSV ({error})") from None


def _delimited(path: Path, rows: Iterable[tuple[int, list[str]]], wanted: WantedColumns) -> Table:
    """rows: the line number and the fields of the header, then of each row."""
    remaining = iter(rows)
    header = [name.strip() for name in next(remaining)[1]]
    columns = wanted.among(header, str(path))
    for name in columns.names:
        if header.count(name) > 1:
            raise ConfigurationError(f"{path}, line 1: the header names the column '{name}' twice")
    stores = [(header.index(name), list[str]()) for name in columns.names]
    numbers = []
    for number, fields in remaining:
        if len(fields) != len(header):
            raise ConfigurationError(
                f"{path}, line {number}: {len(fields)} fields, where the header has {len(header)}: a row cut short, or "
                "a line break or separator within a text"
            )
        for position, store in stores:
            store.append(fields[position])
        numbers.append(number)
    return Table(str(path), columns, dict(zip(columns.names, (store for _, store in stores), strict=True)), numbers)


def read_jsonl(path: Path, wanted: WantedColumns) -> Table:
    """One JSON object a line. The first one's keys are the columns; each line must have those that are chosen."""
    values: dict[str, list[Any]] = {}
    numbers: list[int] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        try:
            row = loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}, line {number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise ConfigurationError(f"{path}, line {number}: not a JSON object such as {{'text': ..., 'label': ...}}")
        if not numbers:
            columns = wanted.among(list(row), str(path))
            values = {name: [] for name in columns.names}
        for name, store in values.items():
            if name not in row:
                raise ConfigurationError(f"{path}, line {number}: no '{name}'; it has {listed(row)}")
            if isinstance(row[name], str) and not _is_unicode(row[name]):
                raise ConfigurationError(f"{path}, line {number}: '{name}' holds half a character (a lone surrogate)")
            store.append(row[name])
        numbers.append(number)
    return Table(str(path), columns, values, numbers)


def _is_unicode(text: str) -> bool:
    """JSON can write what no text can hold: \\ud83d alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_parquet(path: Path, wanted: WantedColumns) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigurationError(f"{path}: Parquet needs pyarrow: pip install 'pyarrow>=14.0.1'") from None
    try:
        file = parquet.ParquetFile(io.BytesIO(read_bytes(path)))
        names = file.schema_arrow.names
        columns = wanted.among(names, str(path))
        for name in columns.names:
            if names.count(name) > 1:
                raise ConfigurationError(f"{path}: two columns are named '{name}'")
        content = file.read(columns=columns.names)
        content.validate(full=True)  # a damaged file may be of the right form and hold texts that are not UTF-8
        values = content.to_pydict()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not a readable Parquet file ({first_line(error)})") from None
    return Table(str(path), columns, values, range(1, file.metadata.num_rows + 1), unit="row")


FORMATS: dict[str, Callable[[Path, WantedColumns], Table]] = {
    ".tsv": read_tsv,
    ".csv": read_csv,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
