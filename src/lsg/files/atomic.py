"""Writes a file whole or not at all, a secret one for its owner alone; names the file in errors of writing."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".partial"  # a file or folder while it is being written
OWNER_ONLY, OWNER_ONLY_FOLDER = 0o600, 0o700


def write_atomic(target: Path, text: str, *, secret: bool = False) -> None:
    """Write a text. At every moment the file is the old one or the new one. secret: only its owner may read it."""
    with atomic_path(target, secret=secret) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic_path(target: Path, *, secret: bool = False) -> Iterator[Path]:
    """Gives the path of a file beside the target to write to; it replaces the target at the end, if all went well.

    So the target is written whole or not at all. Missing folders are made. secret: only the owner may read it.
    """
    given, target = target, Path(os.path.realpath(target))  # of a link, what it names
    partial = target.with_name(target.name + UNFINISHED)
    with errors_naming(given):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # a pipe, say: nothing can take its place
            yield target
            return
        try:
            if secret:
                create_secret(partial)
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            if target.exists() and not secret:
                shutil.copymode(target, partial)
            partial.replace(target)
            sync_folder(target.parent)
        finally:
            partial.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """With those that it stands in, unless it is there."""
    with errors_naming(path):
        path.mkdir(parents=True, exist_ok=True)


def create_secret(path: Path) -> None:
    """Make an empty file that only its owner can read, whatever the umask: before its first byte is written."""
    path.unlink(missing_ok=True)  # what a crash left
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY))
    path.chmod(OWNER_ONLY)  # a umask may have taken the owner's own rights away


def sync_folder(folder: Path) -> None:
    """Make names in a folder survive a power failure (where folders can be opened: not on Windows)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make a folder with all that is in it survive a power failure."""
    for place, _, names in os.walk(folder):
        for name in names:
            with (Path(place) / name).open("rb+") as file:
                os.fsync(file.fileno())
        sync_folder(Path(place))


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Adds the path to the message of an OSError (a full disk, say): neither Python nor safetensors always names it."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        if error.strerror is None:
            raise  # an error of our own, whose message names the file
        raise OSError(f"cannot write {path} ({error.strerror})") from error
    except SafetensorError as error:
        raise OSError(f"cannot write {path} ({error})") from error
