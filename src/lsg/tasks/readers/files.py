"""Where data lies: what --data names, and the bytes and text of a file, with errors that name the file."""

import io
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from lsg.errors import ConfigurationError
from lsg.files import foreign_files
from lsg.tasks.readers.progress import Reading

LONGEST_LINE = 1 << 25  # characters
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def local_path(data: str) -> Path | None:
    """The file or folder that --data names; None if there is none and it can be a hub name."""
    try:
        path = Path(data).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of a user whom nobody knows
        raise ConfigurationError(f"--data {data}: cannot be read ({getattr(error, 'strerror', error)})") from None
    if HUB_NAME.fullmatch(data):
        return None
    raise ConfigurationError(f"--data {data}: no such file or folder")


def require_folder(path: Path, task: str) -> None:
    if not path.is_dir():
        raise ConfigurationError(f"--data {path}: a file, where --task {task} reads a folder")


def subfolder_or_self(folder: Path, name: str) -> Path:
    """Data sets are unpacked into a folder of their own: either that one or its parent may be named."""
    return folder / name if (folder / name).is_dir() else folder


def read_bytes(path: Path) -> bytes:
    content = foreign_files.read_bytes(path)
    if not content:
        raise ConfigurationError(f"{path}: the file is empty")
    return content


def text_lines(path: Path, newline: str = "\n") -> Iterator[str]:
    """Each line with its end, without a byte order mark and without blank lines at the file's end.

    newline: where a line ends, as `open` takes it. A line at a time is in memory; a reading that takes long is told.
    """
    with foreign_files.open_regular(path) as file:
        reading = Reading(f"reading {path.name}", os.fstat(file.fileno()).st_size)
        text = io.TextIOWrapper(file, encoding="utf-8", newline=newline)
        blank: list[tuple[str, int]] = []  # lines that may be the last ones, each with how often it comes
        written = False
        for number, line in enumerate(_decoded(path, text), 1):
            if number == 1:
                line = line.removeprefix("\ufeff")
            if number % 4096 == 0:
                reading.at(file.tell())
            if not line.strip("\r\n"):
                again = blank[-1][1] if blank and blank[-1][0] == line else 0
                blank[-1 if again else len(blank) :] = [(line, again + 1)]
                continue
            for empty, times in blank:
                yield from itertools.repeat(empty, times)
            blank.clear()
            yield line
            written = True
        reading.end()
    if not written:
        raise ConfigurationError(f"{path}: the file {'holds blank lines only' if blank else 'is empty'}")


def _decoded(path: Path, text: io.TextIOWrapper) -> Iterator[str]:
    number = 0
    try:
        while line := text.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                raise ConfigurationError(f"{path}, line {number}: longer than {LONGEST_LINE:,} characters")
            yield line
    except UnicodeDecodeError:
        raise ConfigurationError(_not_utf8(path)) from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from None


def _not_utf8(path: Path) -> str:
    """Where the first such byte stands. The file is read again: a decoder counts from its last block."""
    with foreign_files.open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"{path}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8 text"
    return f"{path}: not UTF-8 text"
