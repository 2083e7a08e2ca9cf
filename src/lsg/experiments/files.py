"""Files that are written whole or not at all, and errors of writing that name them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".partial"  # a file or folder while it is being written


def write_whole(target: Path, text: str) -> None:
    """At every moment the file is the old one or the new one."""
    partial = target.with_name(target.name + UNFINISHED)
    with naming(target):
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
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
