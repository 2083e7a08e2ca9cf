"""The catalog: every task is there, bad names and options are refused, digits are the demo's."""

import subprocess
import sys

import pytest
import torch

from lsg.tasks.catalog import TASKS, load_task
from lsg.tasks.data import Images
from lsg.tasks.digits import TEST_IMAGES, TRAIN_IMAGES, digits
from tests.support.refusals import refusal


def test_every_task_of_the_paper_and_ones_own():
    assert {name for name, task in TASKS.items() if task.kind == "text"} == {"sst2", "qnli", "qqp", "mnli", "text"}
    assert {name for name, task in TASKS.items() if task.kind == "image"} == {
        "cifar10",
        "fashion-mnist",
        "digits",
        "images",
    }
    assert all(task.title and task.name == name for name, task in TASKS.items())


def test_unknown_task_lists_the_known_and_suggests_one():
    message = refusal("sst-2", None)
    assert "--task 'sst-2'" in message and "did you mean sst2?" in message and "cifar10" in message
    assert "did you mean" not in refusal("nonsense", None)


def test_digits_are_the_demos_as_bytes():
    data, original = load_task("digits"), digits()
    assert isinstance(data.train, Images)
    assert data.train.pixels.shape == (TRAIN_IMAGES, 1, 8, 8) and data.train.pixels.dtype == torch.uint8
    assert len(data.evaluation["test"]) == TEST_IMAGES
    assert torch.equal((data.train.pixels / 255 * 16).round() / 16, original.train_images)
    assert torch.equal(data.train.labels, original.train_labels)
    assert data.label_names == tuple("0123456789")


def test_options_that_a_task_cannot_use_are_refused(tmp_path):
    assert "takes no data" in refusal("digits", tmp_path)
    assert "--label-column" in refusal("sst2", tmp_path, label_column="label")


@pytest.mark.parametrize("task", ["text", "images"])
def test_own_data_must_be_named(task):
    assert f"--task {task} needs --data" in refusal(task, None)


@pytest.mark.parametrize("task", [name for name in TASKS if name != "digits"])
def test_a_missing_path_is_named(task, tmp_path):
    assert str(tmp_path / "nowhere") in refusal(task, tmp_path / "nowhere")
    assert "cannot be read" in refusal(task, "a" * 300)


@pytest.mark.parametrize("task", ["sst2", "cifar10", "fashion-mnist", "images"])
def test_a_file_where_a_folder_is_read(task, tmp_path):
    (tmp_path / "file.tsv").write_text("sentence\tlabel\n")
    assert "a file, where" in refusal(task, tmp_path / "file.tsv")


def test_reading_needs_neither_datasets_nor_pyarrow():
    code = "import sys, lsg.tasks.catalog; assert not {'datasets', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
