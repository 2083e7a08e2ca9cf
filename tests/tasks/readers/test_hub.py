"""Data by hub name, with a stand-in for the `datasets` library that has the parts of its interface that we use."""

import sys
import types
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lsg.tasks.catalog import load_task
from lsg.tasks.data import Images, Texts
from tests.support.refusals import refusal


class Split:
    """Of `datasets.Dataset`: column_names, features with .names for classes, len, and a column by name."""

    def __init__(self, columns: dict[str, list[Any]], classes: list[str] | None = None) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.features = {name: types.SimpleNamespace(dtype="string") for name in columns}
        if classes is not None:
            self.features["label"] = types.SimpleNamespace(names=classes)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> Any:
        return iter(self.columns[name])  # newer versions return a lazy column, not a list


class Hub:
    def __init__(self) -> None:
        self.splits: dict[str, Split] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.error: Exception | None = None

    def load_dataset(self, path: str, name: str | None = None) -> dict[str, Split]:
        self.asked.append((path, name))
        if self.error is not None:
            raise self.error
        return self.splits


@pytest.fixture
def hub(monkeypatch) -> Hub:
    stand_in = Hub()
    module = types.ModuleType("datasets")
    module.load_dataset = stand_in.load_dataset  # type: ignore[attr-defined]
    module.__version__ = "4.0.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return stand_in


def sentences(labels: list[int], classes: list[str] | None) -> Split:
    return Split({"sentence": [f"s{i}" for i in range(len(labels))], "label": labels, "idx": labels}, classes)


def test_sst2_from_its_standard_name(hub):
    classes = ["negative", "positive"]
    hub.splits = {"train": sentences([1, 0, 1], classes), "validation": sentences([0], classes)}
    data = load_task("sst2")
    assert hub.asked == [("nyu-mll/glue", "sst2")] and data.source == "nyu-mll/glue (sst2)"
    assert isinstance(data.train, Texts) and data.train.texts == ["s0", "s1", "s2"]
    assert data.train.labels.tolist() == [1, 0, 1] and len(data.evaluation["dev"]) == 1


def test_mnli_by_class_names_whatever_their_order(hub):
    classes = ["contradiction", "entailment", "neutral"]
    split = Split({"premise": ["p", "q"], "hypothesis": ["h", "i"], "label": [0, 1]}, classes)
    hub.splits = {"train": split, "validation_matched": split, "validation_mismatched": split}
    data = load_task("mnli", "somebody/glue")
    assert hub.asked == [("somebody/glue", "mnli")]
    assert list(data.evaluation) == ["dev_matched", "dev_mismatched"]
    assert data.train.labels.tolist() == [2, 0] and data.label_names[2] == "contradiction"


def test_texts_with_guessed_columns(hub):
    hub.splits = {"train": sentences([3, 1, 3], None), "test": sentences([1], None)}
    data = load_task("text", "somebody/reviews")
    assert hub.asked == [("somebody/reviews", None)]
    assert data.label_names == ("1", "3") and data.train.labels.tolist() == [1, 0, 1] and "test" in data.evaluation


def test_persons_by_a_column_of_ids(hub):
    split = Split({"text": ["a", "b", "c"], "label": [0, 1, 0], "author": [7, 7, 9]})
    hub.splits = {"train": split, "test": sentences([1, 0], None)}
    hub.splits["test"].columns["text"] = hub.splits["test"].columns.pop("sentence")
    hub.splits["test"].column_names = ["text", "label", "idx"]
    data = load_task("text", "somebody/reviews", unit_column="author")
    assert isinstance(data.train, Texts) and data.train.persons == ["7", "7", "9"]
    split.columns["author"][1] = None  # type: ignore[call-overload]
    assert "somebody/reviews train, row 2: 'author' is empty" in refusal(
        "text", "somebody/reviews", unit_column="author"
    )


@pytest.mark.parametrize(
    ("task", "column", "shape"), [("cifar10", "img", (32, 32, 3)), ("fashion-mnist", "image", (28, 28))]
)
def test_images(hub, task, column, shape):
    arrays = np.random.default_rng(0).integers(0, 256, (4, *shape), dtype=np.uint8)
    split = Split({column: [Image.fromarray(array) for array in arrays], "label": [0, 9, 5, 1]})
    hub.splits = {"train": split, "test": split}
    data = load_task(task)
    assert isinstance(data.train, Images) and data.train.labels.tolist() == [0, 9, 5, 1]
    expected = arrays.transpose(0, 3, 1, 2) if len(shape) == 3 else arrays[:, None]
    assert np.array_equal(data.train.pixels.numpy(), expected) and data.train.pixels.is_contiguous()


def test_refusals(hub):
    classes = ["negative", "positive"]
    hub.splits = {"train": sentences([1, -1], classes)}
    assert "nyu-mll/glue (sst2) train, row 2: label '-1' is not one of negative, positive" in refusal("sst2", None)
    hub.splits = {"train": sentences([1, 0], classes)}
    assert "no split 'validation'; it has 'train'" in refusal("sst2", None)
    hub.splits = {"train": Split({"text": ["a"], "label": [0]}, classes)}
    assert "no column 'sentence'; it has 'text', 'label'" in refusal("sst2", None)
    hub.splits = {"train": Split({"text": [], "label": []}, classes)}
    assert "x/y: none of the splits dev" in refusal("text", "x/y")
    hub.splits["test"] = hub.splits["train"]
    assert "x/y train: no rows" in refusal("text", "x/y")
    assert "uoft-cs/cifar10 train: no column 'img'" in refusal("cifar10", None)
    image = Image.new("RGB", (32, 32))
    hub.splits = {"train": Split({"img": [image, image.resize((8, 8))], "label": [0, 1]})}
    assert "uoft-cs/cifar10 train, row 2: an image of (8, 8, 3)" in refusal("cifar10", None)
    hub.splits = {"train": Split({"img": [image, image], "label": [0, 10]})}
    assert "uoft-cs/cifar10 train, row 2: label 10 is not between 0 and 9" in refusal("cifar10", None)


def test_what_the_hub_says_is_passed_on_in_one_line(hub):
    hub.error = FileNotFoundError("Dataset 'x/y' doesn't exist\nand more")
    assert refusal("sst2", "x/y") == ("x/y is no local path, and the hub refused it: Dataset 'x/y' doesn't exist")


def test_versions_that_run_code_of_data_sets_are_refused(hub):
    sys.modules["datasets"].__version__ = "3.6.0"  # type: ignore[attr-defined]
    assert "datasets 3.6.0 can run code from the hub" in refusal("sst2", None) and not hub.asked


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refusal("sst2", "some/folder")
    assert "some/folder is no local path" in message and "pip install 'datasets>=4'" in message
