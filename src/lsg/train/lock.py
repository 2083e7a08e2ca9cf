"""Keeps two processes out of one output folder: its path in, a block that one process at a time enters."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lsg.errors import ConfigurationError
from lsg.files.atomic import OWNER_ONLY, OWNER_ONLY_FOLDER, UNFINISHED, errors_naming

try:
    import fcntl
except ImportError:  # Windows, where a run folder has no lock
    fcntl = None  # type: ignore[assignment]

_NAME = "lock"  # there while a process works in the folder, or after one was killed


@contextlib.contextmanager
def held_folder(path: Path, check: Callable[[], None]) -> Iterator[None]:
    """The folder is made where there is none, and removed if it is empty at the end. check: refuses what it holds."""
    check()
    made = not path.exists()
    with errors_naming(path):
        path.mkdir(mode=OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
    try:
        with exclusive(path / _NAME, f"--output {path}"):
            check()  # again: another process may have been here meanwhile
            yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()


def is_leftover(entry: Path) -> bool:
    """What a process that was killed may leave in a folder without having begun anything."""
    return entry.name == _NAME or entry.name.endswith(UNFINISHED)


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Refuses with `what` in one line if another process is inside. The system frees the lock of one that dies."""
    with errors_naming(path):
        file = _locked(path, what)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is freed: see _locked
        os.close(file)


def _locked(path: Path, what: str) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, OWNER_ONLY)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had the lock until now may have removed the file: then this lock is one of nothing.
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                os.truncate(file, 0)
                os.write(file, f"{os.getpid()}\n".encode())
                return file
        except BlockingIOError:
            owner = os.pread(file, 20, 0).decode(errors="replace").strip()
            os.close(file)
            who = f"process {owner}" if owner.isdecimal() else "another process"
            raise ConfigurationError(f"{what}: {who} is at work there; wait until it ends") from None
        except OSError:
            os.close(file)
            raise
        os.close(file)
