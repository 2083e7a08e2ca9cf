"""Every task that can be trained by name: --task and --data come in, `TaskData` comes out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lsg.errors import ConfigurationError
from lsg.tasks.data import Images, TaskData
from lsg.tasks.digits import digits
from lsg.tasks.names import KINDS, Kind, check_task
from lsg.tasks.readers.cifar import read_cifar10
from lsg.tasks.readers.columns import NamedColumns, WantedColumns, WantedDocument, WantedTags
from lsg.tasks.readers.documents import read_documents
from lsg.tasks.readers.glue import GLUE, read_glue
from lsg.tasks.readers.idx import read_fashion_mnist
from lsg.tasks.readers.image_folder import read_image_folder
from lsg.tasks.readers.tags import read_tagged
from lsg.tasks.readers.text import read_text_task


@dataclass(frozen=True)
class Task:
    """One entry of the catalog. read: takes --data, None where it was not given, and the columns that were named."""

    name: str
    kind: Kind
    title: str
    read: Callable[[str | None, NamedColumns], TaskData] = field(repr=False)


def load_task(
    task: str,
    data: str | None = None,
    *,
    text_column: str | None = None,
    pair_column: str | None = None,
    prompt_column: str | None = None,
    label_column: str | None = None,
    unit_column: str | None = None,
) -> TaskData:
    """Read a task's training and evaluation data.

    task: a name of TASKS. data: a local path or a hub name; None takes the task's own source. The columns are those of
    --task text, tokens and generate; None is guessed from common names, but for unit_column, of the ids of persons.
    Anything wrong with the data is a `ConfigurationError` of one line that names the file and the line or row.
    """
    check_task(task)
    return TASKS[task].read(data, NamedColumns(text_column, pair_column, prompt_column, label_column, unit_column))


def _own_columns(read: Callable[[str | None], TaskData]) -> Callable[[str | None, NamedColumns], TaskData]:
    """For a task that has no columns to choose."""

    def read_without(data: str | None, named: NamedColumns) -> TaskData:
        if named != NamedColumns():
            raise ConfigurationError(
                "--text-column, --pair-column, --prompt-column, --label-column and --unit-column are for --task text, "
                "tokens and generate alone"
            )
        return read(data)

    return read_without


def _read_text(data: str | None, named: NamedColumns) -> TaskData:
    named.refuse("text", "prompt")
    return read_text_task(_needed(data, "text"), WantedColumns(named.text, named.pair, named.label, named.unit))


def _read_tokens(data: str | None, named: NamedColumns) -> TaskData:
    named.refuse("tokens", "pair", "prompt")
    if data is None:
        raise ConfigurationError(
            "--task tokens needs --data: a JSONL or Parquet file, a folder of train.* and dev.*, or a hub name"
        )
    return read_tagged(data, WantedTags(named.text, named.label, named.unit))


def _read_generate(data: str | None, named: NamedColumns) -> TaskData:
    named.refuse("generate", "pair", "label")
    return read_documents(_needed(data, "generate"), WantedDocument(named.text, named.prompt, named.unit))


def _needed(data: str | None, task: str) -> str:
    if data is None:
        raise ConfigurationError(
            f"--task {task} needs --data: a TSV, CSV, JSONL or Parquet file, a folder of train.* and dev.*, or a hub "
            "name"
        )
    return data


def _read_images(data: str | None) -> TaskData:
    if data is None:
        raise ConfigurationError("--task images needs --data: a folder with train/CLASS/*.png and val/CLASS/*.png")
    return read_image_folder(data)


def _read_digits(data: str | None) -> TaskData:
    if data is not None:
        raise ConfigurationError(f"--data {data}: --task digits reads scikit-learn's own images and takes no data")
    bundle = digits()
    train = Images(_bytes(bundle.train_images), bundle.train_labels)
    test = Images(_bytes(bundle.test_images), bundle.test_labels)
    return TaskData(train, {"test": test}, tuple("0123456789"), "scikit-learn digits")


def _bytes(pixels: Tensor) -> Tensor:
    """From [0, 1]; the 17 shades of these images stay distinct."""
    return (255 * pixels).round().to(torch.uint8)


def _catalog(*tasks: Task) -> dict[str, Task]:
    return {task.name: task for task in tasks}


TASKS = _catalog(
    Task("sst2", "text", "SST-2: is a sentence about a film positive?", _own_columns(partial(read_glue, GLUE["sst2"]))),
    Task("qnli", "text", "QNLI: does a sentence answer a question?", _own_columns(partial(read_glue, GLUE["qnli"]))),
    Task("qqp", "text", "QQP: do two questions ask the same?", _own_columns(partial(read_glue, GLUE["qqp"]))),
    Task("mnli", "text", "MNLI: does one sentence entail another?", _own_columns(partial(read_glue, GLUE["mnli"]))),
    Task("text", "text", "Your texts or pairs of texts", _read_text),
    Task("tokens", "tokens", "Your texts with a tag for each word", _read_tokens),
    Task("generate", "generate", "Your texts, for a language model that writes them", _read_generate),
    Task("cifar10", "image", "CIFAR-10: colour images of ten things", _own_columns(read_cifar10)),
    Task("fashion-mnist", "image", "Fashion-MNIST: grey images of clothes", _own_columns(read_fashion_mnist)),
    Task("digits", "image", "scikit-learn's handwritten digits, no download", _own_columns(_read_digits)),
    Task("images", "image", "Your images, a folder a class", _own_columns(_read_images)),
)
assert {task.name: task.kind for task in TASKS.values()} == KINDS
