"""Files that are written whole or not at all, and errors of writing that name them."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".partial"  # a file or folder while it is being written


def write_whole(target: Path, text: str) -> None:
    """At every moment the file is the old one or the new one."""
    with whole(target) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Where to write the file instead: what is written there takes the target's place at the end, if all went well."""
    given, target = target, Path(os.path.realpath(target))  # of a link, what it names
    partial = target.with_name(target.name + UNFINISHED)
    with naming(given):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # a pipe, say: nothing can take its place
            yield target
            return
        try:
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            if target.exists():
                shutil.copymode(target, partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of writing (a full disk, say) name the file, which neither Python nor safetensors does by itself."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        if error.strerror is None:
            raise  # one of ours, which names its file
        raise OSError(f"cannot write {path} ({error.strerror})") from error
    except SafetensorError as error:
        raise OSError(f"cannot write {path} ({error})") from error
