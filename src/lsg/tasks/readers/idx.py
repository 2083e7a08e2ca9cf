"""Fashion-MNIST: a folder of idx files, gzipped or not, or the hub's copy, comes in.

An idx file: two zero bytes, the type (8: unsigned bytes), the number of dimensions, each dimension as a big-endian
32-bit integer, then the values.
"""

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lsg.errors import ConfigurationError
from lsg.tasks.data import Images, TaskData
from lsg.tasks.readers.files import local_path, read_bytes, require_folder
from lsg.tasks.readers.hub import hub_images, load_hub
from lsg.tasks.readers.pixels import labelled_images

HUB_NAME = "zalando-datasets/fashion_mnist"
CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
PARTS = {"train": "train", "test": "t10k"}  # part -> how its files' names begin
UNSIGNED_BYTES = 8
LARGEST = 1 << 29  # bytes: ten times what these images take


def read_fashion_mnist(data: str | None) -> TaskData:
    folder = None if data is None else local_path(data)
    if folder is None:
        source = data or HUB_NAME
        splits = load_hub(source)
        parts = {part: hub_images(splits, part, source, "image", len(CLASSES)) for part in PARTS}
    else:
        require_folder(folder, "fashion-mnist")
        source = str(folder)
        # All four are looked for first, so that a missing one is told at once.
        files = {
            part: (_find(folder, f"{start}-images-idx3-ubyte"), _find(folder, f"{start}-labels-idx1-ubyte"))
            for part, start in PARTS.items()
        }
        parts = {part: _read_part(images, labels) for part, (images, labels) in files.items()}
    return TaskData(parts["train"], {"test": parts["test"]}, CLASSES, source)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ConfigurationError(f"{folder / name}: no such file, nor with .gz")


def _read_part(images: Path, labels: Path) -> Images:
    pixels, classes = _read_idx(images, 3), _read_idx(labels, 1)
    if len(pixels) != len(classes):
        raise ConfigurationError(f"{labels}: {len(classes):,} labels for the {len(pixels):,} images of {images.name}")
    return labelled_images(pixels[:, None], classes, len(CLASSES), str(labels), "label")


def _read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    content = read_bytes(path)
    if path.suffix == ".gz":
        try:
            with gzip.open(io.BytesIO(content)) as unpacked:
                content = unpacked.read(LARGEST + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigurationError(f"{path}: not a whole gzip file ({error})") from None
        if len(content) > LARGEST:
            raise ConfigurationError(f"{path}: unpacks to more than {LARGEST:,} bytes, too many for these images")
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, UNSIGNED_BYTES, dimensions))
    if content[:4] != magic or len(content) < header:
        raise ConfigurationError(
            f"{path}: begins with 0x{content[:4].hex()}, where idx of {dimensions} dimensions has 0x{magic.hex()}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape) or 0 in shape:
        raise ConfigurationError(
            f"{path}: {len(content) - header:,} values, where its header says {' x '.join(map(str, shape))}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)
