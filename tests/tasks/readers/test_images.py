"""Images: CIFAR-10's binary files, idx files and image folders, whole and broken."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lsg.tasks.catalog import load_task
from lsg.tasks.data import Images
from tests.support.refusals import refusal

RANDOM = np.random.default_rng(0)


def pixels_of(records) -> np.ndarray:
    assert isinstance(records, Images) and records.pixels.dtype == torch.uint8 and records.labels.dtype == torch.int64
    return records.pixels.numpy()


@pytest.fixture
def cifar(tmp_path) -> Path:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        records = RANDOM.integers(0, 256, (3, 3073), dtype=np.uint8)
        records[:, 0] = (0, 9, 4)
        records.tofile(folder / f"{name}.bin")
    return folder


def test_cifar10(cifar):
    data = load_task("cifar10", str(cifar.parent))
    assert data.source == str(cifar) and pixels_of(data.train).shape == (15, 3, 32, 32)
    assert data.train.labels.tolist() == [0, 9, 4] * 5 and data.label_names[9] == "truck"
    second = np.frombuffer((cifar / "data_batch_2.bin").read_bytes(), np.uint8).reshape(3, 3073)
    # Row by row, first all red values, then the green and the blue ones.
    assert pixels_of(data.train)[3, 2, 31, 30] == second[0, 1 + 2 * 1024 + 31 * 32 + 30]
    assert len(load_task("cifar10", str(cifar)).evaluation["test"]) == 3


def test_cifar10_broken(cifar):
    path = cifar / "data_batch_3.bin"
    records = np.fromfile(path, np.uint8)
    records[3073] = 10
    records.tofile(path)
    assert refusal("cifar10", cifar) == f"{path}, image 2: label 10 is not between 0 and 9"
    records[:-1].tofile(path)
    assert f"{path}: 9,218 bytes are no multiple of 3,073" in refusal("cifar10", cifar)
    path.write_bytes(b"")
    assert refusal("cifar10", cifar) == f"{path}: the file is empty"
    path.unlink()
    assert f"{path}: no such file" in refusal("cifar10", cifar)


@pytest.mark.parametrize("parent", [True, False])
def test_cifar10_pickles_are_refused_unread(tmp_path, parent):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self):
            return Path.touch, (marker,)

    (folder / "data_batch_1").write_bytes(pickle.dumps(Hostile()))
    message = refusal("cifar10", tmp_path if parent else folder)
    assert "cifar-10-batches-py" in message and "pickles" in message and "cifar-10-batches-bin" in message
    assert not marker.exists()


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def fashion(tmp_path) -> Path:
    for part, count, pack in (("train", 5, gzip.compress), ("t10k", 2, bytes)):
        ending = ".gz" if pack is gzip.compress else ""
        images = np.full((count, 28, 28), count, np.uint8)
        images[:, 27, 0] = np.arange(count)
        (tmp_path / f"{part}-images-idx3-ubyte{ending}").write_bytes(pack(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte{ending}").write_bytes(pack(idx(np.arange(count, dtype=np.uint8))))
    return tmp_path


def test_fashion_mnist_packed_and_unpacked(fashion):
    data = load_task("fashion-mnist", str(fashion))
    assert pixels_of(data.train).shape == (5, 1, 28, 28) and pixels_of(data.train)[:, 0, 27, 0].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert data.train.labels.tolist() == [0, 1, 2, 3, 4] and data.label_names[1] == "Trouser"
    assert pixels_of(data.evaluation["test"])[1, 0, 0, 0] == 2


def test_fashion_mnist_broken(fashion):
    images, labels = fashion / "t10k-images-idx3-ubyte", fashion / "t10k-labels-idx1-ubyte"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-1])
    assert f"{labels}: 1 values, where its header says 2" in refusal("fashion-mnist", fashion)
    labels.write_bytes(whole[:6])
    assert str(labels) in refusal("fashion-mnist", fashion)
    labels.write_bytes(b"\x00\x00\x0d" + whole[3:])
    assert f"{labels}: begins with 0x00000d01" in refusal("fashion-mnist", fashion)
    labels.write_bytes(whole[:-1] + b"\x0a")
    assert refusal("fashion-mnist", fashion) == f"{labels}, label 2: label 10 is not between 0 and 9"
    labels.write_bytes(idx(np.zeros(3, np.uint8)))
    assert f"{labels}: 3 labels for the 2 images" in refusal("fashion-mnist", fashion)
    images.unlink()
    assert f"{images}: no such file" in refusal("fashion-mnist", fashion)


def test_a_cut_gzip_file(fashion):
    path = fashion / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    assert f"{path}: not a whole gzip file" in refusal("fashion-mnist", fashion)
    path.write_bytes(b"not gzip")
    assert f"{path}: not a whole gzip file" in refusal("fashion-mnist", fashion)


def image(path: Path, value: int = 0, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16") else (value, 7, 9, 0)[: len(mode)]).save(path)
    return path


def test_image_folder_with_parts(tmp_path):
    image(tmp_path / "train/dog/1.png", 10)
    image(tmp_path / "train/cat/1.bmp", 20)
    image(tmp_path / "train/cat/2.png", 30, mode="L")
    image(tmp_path / "train/cat/3.PNG", 40, mode="RGBA")
    (tmp_path / "train/cat/notes.txt").write_text("left alone")
    image(tmp_path / "val/dog/1.png", 50)
    data = load_task("images", str(tmp_path))
    assert data.label_names == ("cat", "dog") and data.train.labels.tolist() == [0, 0, 0, 1]
    assert pixels_of(data.train).shape == (4, 3, 4, 6)
    assert pixels_of(data.train)[:, :, 3, 5].tolist() == [[20, 7, 9], [30, 30, 30], [40, 7, 9], [10, 7, 9]]
    assert list(data.evaluation) == ["val"] and data.evaluation["val"].labels.tolist() == [1]


def test_image_folder_of_classes_keeps_a_tenth(tmp_path):
    for i in range(10):
        image(tmp_path / "a" / f"{i}.png", i)
        image(tmp_path / "b" / f"{i}.png", 100 + i)
    data = load_task("images", str(tmp_path))
    held_out = data.evaluation["held-out"]
    assert 0 < len(held_out) < 10
    for part in (data.train, held_out):
        assert (pixels_of(part)[:, 0, 0, 0] >= 100).astype(int).tolist() == part.labels.tolist()
    values = np.concatenate([pixels_of(data.train), pixels_of(held_out)])[:, 0, 0, 0]
    assert sorted(values.tolist()) == [*range(10), *range(100, 110)]


def test_image_folder_broken(tmp_path):
    image(tmp_path / "train/a/1.png")
    second = image(tmp_path / "train/b/2.png", size=(5, 4))
    image(tmp_path / "test/a/1.png")
    assert refusal("images", tmp_path).startswith(f"{second}: 5 x 4 pixels, where the first image has 6 x 4")
    second.write_bytes(b"no image")
    assert refusal("images", tmp_path) == f"{second}: not an image, or a corrupt one"
    noise = Image.fromarray(RANDOM.integers(0, 256, (4, 6, 3), dtype=np.uint8))
    noise.save(second)
    second.write_bytes(second.read_bytes()[:60])
    assert refusal("images", tmp_path).startswith(f"{second}: a corrupt image")
    noise.save(second)
    damaged = bytearray(second.read_bytes())
    damaged[50] ^= 0xFF
    second.write_bytes(bytes(damaged))
    assert refusal("images", tmp_path).startswith(f"{second}: a corrupt image")
    second.with_suffix(".ppm").write_bytes(b"P4 30000 5000\n")  # claims more pixels than there are bytes
    second.unlink()
    assert "corrupt image" in refusal("images", tmp_path) and "decompression bomb" in refusal("images", tmp_path)
    second.with_suffix(".ppm").unlink()
    image(second, 1000, mode="I;16")
    assert refusal("images", tmp_path).startswith(f"{second}: more than 8 bits a pixel")
    second.unlink()
    assert refusal("images", tmp_path).startswith(f"{tmp_path / 'train/b'}: no images")
    second.parent.rmdir()
    assert "two or more classes; it has 'a'" in refusal("images", tmp_path)


def test_image_folder_parts_must_fit(tmp_path):
    image(tmp_path / "train/a/1.png")
    image(tmp_path / "train/b/1.png")
    assert f"{tmp_path}: besides train" in refusal("images", tmp_path)
    (tmp_path / "test/a").mkdir(parents=True)
    assert f"{tmp_path / 'test'}: no images" in refusal("images", tmp_path)
    image(tmp_path / "test/c/1.png")
    assert f"{tmp_path / 'test/c'}: a class that" in refusal("images", tmp_path)
