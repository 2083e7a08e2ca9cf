"""Paths that others named in, bytes and text out. Only regular files are read, and none that is too large.

A pipe or a device under a file's name would hold a reader for ever. Errors name the file, in one line.
"""

import os
import stat
from pathlib import Path
from typing import IO

from lsg.errors import ConfigurationError

SETTINGS = 1 << 15  # bytes of a file that people write by hand
DOCUMENT = 1 << 28  # bytes of a result, a row of metrics or any other file of values


def open_regular(path: Path) -> IO[bytes]:
    """For reading, without a buffer of its own to wait for. Refuses what is not a regular file, or a link to one."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise ConfigurationError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ConfigurationError(f"{path}: not a regular file, but a folder, a pipe or a device")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """most: a larger file is refused before it is read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise ConfigurationError(f"{path}: {size:,} bytes; such a file has at most {most:,}")
        try:
            return file.read()
        except OSError as error:
            raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from None


def read_text(path: Path, most: int = DOCUMENT) -> str:
    """UTF-8, whatever the locale."""
    content = read_bytes(path, most)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 text (byte {error.start})") from None
