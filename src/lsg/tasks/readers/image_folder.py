"""Anyone's images: a folder with a folder a class comes in, with or without train and val folders above them.

All images must have one size: how to resize or crop is a choice that belongs to whoever prepares the data.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from lsg.errors import ConfigurationError
from lsg.extras import needs_extra
from lsg.files.foreign_files import open_regular
from lsg.files.foreign_text import listed
from lsg.tasks.data import Images, TaskData
from lsg.tasks.readers.files import local_path, require_folder
from lsg.tasks.readers.progress import Reading
from lsg.tasks.split import hold_out

with needs_extra("train", "reading images"):
    from PIL import Image, UnidentifiedImageError

EVALUATION_PARTS = ("val", "validation", "valid", "dev", "test")  # the first that is there is the evaluation data
# No other decoder is tried, whatever a file claims to be. Other files, such as notes, are left alone.
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP", ".ppm": "PPM", ".gif": "GIF"}
# SyntaxError is what Pillow raises for a broken PNG chunk.
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombWarning, Image.DecompressionBombError)
DEEP_MODES = ("I", "F")  # more than 8 bits a pixel, which conversion to RGB would cut off


def read_image_folder(data: str) -> TaskData:
    folder = local_path(data)
    if folder is None:
        raise ConfigurationError(f"--data {data}: no such folder")
    require_folder(folder, "images")
    if (folder / "train").is_dir():
        return _from_parts(folder)
    names = _classes(folder)
    files = _files(folder, names)
    return hold_out(_read(files, _size(files[0][0])), utf8_names(names), str(folder))


def _from_parts(folder: Path) -> TaskData:
    part = next((part for part in EVALUATION_PARTS if (folder / part).is_dir()), None)
    if part is None:
        raise ConfigurationError(f"{folder}: besides train, it has none of the folders {', '.join(EVALUATION_PARTS)}")
    names = _classes(folder / "train")
    for name in _folders(folder / part):
        if name not in names:
            raise ConfigurationError(f"{folder / part / name}: a class that {folder / 'train'} does not have")
    training, evaluation = _files(folder / "train", names), _files(folder / part, names)
    size = _size(training[0][0])
    return TaskData(_read(training, size), {part: _read(evaluation, size)}, utf8_names(names), str(folder))


def utf8_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of folders as their bytes stand on disk: a locale may have read them in another encoding."""
    return tuple(os.fsencode(name).decode("utf-8", "surrogateescape") for name in names)


def _folders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))


def _classes(folder: Path) -> tuple[str, ...]:
    names = _folders(folder)
    if len(names) < 2:
        raise ConfigurationError(
            f"{folder}: needs a folder for each of two or more classes; it has {listed(names) or 'none'}"
        )
    for name in names:
        if not _images(folder / name):
            raise ConfigurationError(f"{folder / name}: no images ({', '.join(FORMATS)}) in this class")
    return names


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in FORMATS and not path.name.startswith("."))


def _files(folder: Path, names: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Each image with its class."""
    files = [(path, number) for number, name in enumerate(names) for path in _images(folder / name)]
    if not files:
        raise ConfigurationError(f"{folder}: no images ({', '.join(FORMATS)}) in its class folders")
    return files


def physical_memory() -> int:
    """Bytes; as many as anybody has where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 62


def _size(path: Path) -> tuple[int, int]:
    """(width, height)"""
    with _opened(path) as image:
        return image.size


def _read(files: list[tuple[Path, int]], size: tuple[int, int]) -> Images:
    width, height = size
    needed, memory = len(files) * 3 * height * width, physical_memory()
    if needed > memory:  # a few bytes of a packed file can claim a large image
        raise ConfigurationError(
            f"{files[0][0].parent.parent}: {len(files):,} images of {width} x {height} pixels take {needed:,} "
            f"bytes, and this machine has {memory:,}: make them smaller"
        )
    pixels = np.empty((len(files), 3, height, width), dtype=np.uint8)
    reading = Reading("reading images", len(files))
    for row, (path, _) in enumerate(files):
        reading.at(row)
        with _opened(path) as image:
            if image.size != size:
                raise ConfigurationError(
                    f"{path}: {image.width} x {image.height} pixels, where the first image has {width} x {height}; "
                    "all must have one size"
                )
            if image.mode.startswith(DEEP_MODES):
                raise ConfigurationError(f"{path}: more than 8 bits a pixel ({image.mode}); convert it to 8 bits")
            pixels[row] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    reading.end()
    return Images(torch.from_numpy(pixels), torch.tensor([number for _, number in files]))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Its pixels are not decoded yet. Whatever Pillow finds wrong with them, within the block too, names the file."""
    try:
        # A header that claims a huge image is an error too: decoding it would take all memory.
        with (
            warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
            open_regular(path) as file,
            Image.open(file, formats=tuple(set(FORMATS.values()))) as image,
        ):
            yield image
    except ConfigurationError:
        raise
    except UnidentifiedImageError:
        raise ConfigurationError(f"{path}: not an image, or a corrupt one") from None
    except PILLOW_ERRORS as error:
        raise ConfigurationError(f"{path}: a corrupt image ({error})") from None
