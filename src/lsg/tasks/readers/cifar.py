"""CIFAR-10: the folder of its binary version, or the hub's copy, comes in. Its Python version, pickles, is refused."""

from pathlib import Path

import numpy as np
import torch

from lsg.errors import ConfigurationError
from lsg.tasks.data import Images, TaskData
from lsg.tasks.readers.files import local_path, read_bytes, require_folder, subfolder_or_self
from lsg.tasks.readers.hub import hub_images, load_hub
from lsg.tasks.readers.pixels import labelled_images

HUB_NAME = "uoft-cs/cifar10"
FOLDER, PICKLE_FOLDER = "cifar-10-batches-bin", "cifar-10-batches-py"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes: the label, then the red, green and blue planes
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"


def read_cifar10(data: str | None) -> TaskData:
    folder = None if data is None else local_path(data)
    if folder is None:
        name = data or HUB_NAME
        splits = load_hub(name)
        train, test = (hub_images(splits, split, name, "img", len(CLASSES)) for split in ("train", "test"))
        return TaskData(train, {"test": test}, CLASSES, name)
    require_folder(folder, "cifar10")
    _refuse_pickles(folder)
    folder = subfolder_or_self(folder, FOLDER)
    for name in (*TRAIN_FILES, TEST_FILE):
        if not (folder / name).is_file():
            raise ConfigurationError(f"{folder / name}: no such file (--task cifar10 reads CIFAR-10's binary version)")
    batches = [_read_batch(folder / name) for name in TRAIN_FILES]
    train = Images(torch.cat([batch.pixels for batch in batches]), torch.cat([batch.labels for batch in batches]))
    return TaskData(train, {"test": _read_batch(folder / TEST_FILE)}, CLASSES, str(folder))


def _refuse_pickles(folder: Path) -> None:
    for path in (folder / "data_batch_1", folder / PICKLE_FOLDER):
        if path.exists() and not (folder / FOLDER).exists():
            raise ConfigurationError(
                f"{path}: the Python version of CIFAR-10 is made of pickles, which can run code when read; "
                f"get its binary version, the folder {FOLDER}"
            )


def _read_batch(path: Path) -> Images:
    content = np.frombuffer(read_bytes(path), dtype=np.uint8)
    if len(content) % RECORD:
        raise ConfigurationError(
            f"{path}: {len(content):,} bytes are no multiple of {RECORD:,}, an image's: cut short, or not CIFAR-10"
        )
    records = content.reshape(-1, RECORD)
    return labelled_images(records[:, 1:].reshape(-1, *SHAPE), records[:, 0], len(CLASSES), str(path), "image")
