"""Published results: a folder of complete cells comes in, one JSON Lines file with a record a cell goes out.

A record is a cell's `result.json` with the cell's name before it: settings, scores, privacy statement and provenance.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError
from lsg.files.atomic import write_atomic
from lsg.files.foreign_files import read_text
from lsg.files.foreign_text import say, to_json
from lsg.files.foreign_values import json_value


def records_file(folder: Path) -> Path:
    """Beside the folder of cells: `cells` -> `cells.jsonl`."""
    return folder.with_name(f"{folder.name}.jsonl")


def read_records(file: Path) -> dict[str, dict[str, Any]]:
    """Name -> record; nothing where there is no file."""
    records: dict[str, dict[str, Any]] = {}
    lines = read_text(file).strip("\n").split("\n") if file.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json_value(line)
            name = record["name"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{file}, line {number}: not a record ({error!r})") from None
        if name in records:
            raise ConfigurationError(f"{file}, line {number}: a second record of {name}")
        records[name] = record
    return records


def fold(folder: Path) -> Path:
    """Move the results of all cells of a folder into its file of records, and remove the cells, trained models too."""
    file, records = records_file(folder), read_records(records_file(folder))
    cells = sorted(path for path in folder.iterdir() if path.is_dir())
    for cell in cells:
        result = cell / "result.json"
        if not result.is_file():
            raise ConfigurationError(f"{cell}: not complete (it has no result.json); remove it, or run it to its end")
        records[cell.name] = {"name": cell.name, **json_value(read_text(result))}
    lines = (to_json(records[name]) + "\n" for name in sorted(records))
    write_atomic(file, "".join(lines))
    for cell in cells:
        shutil.rmtree(cell)
    return file


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        say(str(fold(Path(argument))))
