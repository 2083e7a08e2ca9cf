"""Where data lies: what --data names, and the bytes and text of a file, with errors that name the file."""

import re
from pathlib import Path

from lsg.errors import ConfigurationError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def local_path(data: str) -> Path | None:
    """The file or folder that --data names; None if there is none and it can be a hub name."""
    path = Path(data).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:
        raise ConfigurationError(f"--data {data}: cannot be read ({error.strerror})") from None
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
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from None
    if not content:
        raise ConfigurationError(f"{path}: the file is empty")
    return content


def read_text(path: Path) -> str:
    """UTF-8, without a byte order mark and without blank lines at its end."""
    content = read_bytes(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{path}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8 text") from None
    text = text.removeprefix("\ufeff").rstrip("\r\n")
    if not text:
        raise ConfigurationError(f"{path}: the file holds blank lines only")
    return text
