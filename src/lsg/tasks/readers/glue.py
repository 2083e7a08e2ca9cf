"""GLUE's tasks: its folders of TSV files, or the hub's copy, come in; labelled texts and pairs come out.

Both sources give a class the same number. The test parts have no labels and are not read: a score is the dev part's.
QQP's first release has rows broken by line breaks, and they are refused here; GLUE offers `QQP-clean.zip` instead.
"""

from dataclasses import dataclass
from pathlib import Path

from lsg.errors import ConfigurationError
from lsg.tasks.data import Records, TaskData, Texts
from lsg.tasks.readers.columns import WantedColumns
from lsg.tasks.readers.files import local_path, require_folder, subfolder_or_self
from lsg.tasks.readers.hub import hub_table, load_hub
from lsg.tasks.readers.records import texts_of
from lsg.tasks.readers.tables import read_tsv

HUB_NAME = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueTask:
    """One task as its TSV files (columns, written_labels) and as the hub (hub_columns, label_names) have it.

    parts: evaluation part, also its file's name -> the hub's split.
    """

    name: str
    folder: str
    columns: WantedColumns
    hub_columns: WantedColumns
    written_labels: tuple[str, ...]
    label_names: tuple[str, ...]
    parts: tuple[tuple[str, str], ...] = (("dev", "validation"),)
    pair_may_be_empty: bool = False


GLUE = {
    task.name: task
    for task in (
        GlueTask(
            "sst2",
            "SST-2",
            columns=WantedColumns("sentence", None, "label"),
            hub_columns=WantedColumns("sentence", None, "label"),
            written_labels=("0", "1"),
            label_names=("negative", "positive"),
        ),
        GlueTask(
            "qnli",
            "QNLI",
            columns=WantedColumns("question", "sentence", "label"),
            hub_columns=WantedColumns("question", "sentence", "label"),
            written_labels=("entailment", "not_entailment"),
            label_names=("entailment", "not_entailment"),
        ),
        GlueTask(
            "qqp",
            "QQP",
            columns=WantedColumns("question1", "question2", "is_duplicate"),
            hub_columns=WantedColumns("question1", "question2", "label"),
            written_labels=("0", "1"),
            label_names=("not_duplicate", "duplicate"),
            pair_may_be_empty=True,  # two of its training pairs have an empty second question
        ),
        GlueTask(
            "mnli",
            "MNLI",
            columns=WantedColumns("sentence1", "sentence2", "gold_label"),
            hub_columns=WantedColumns("premise", "hypothesis", "label"),
            written_labels=("entailment", "neutral", "contradiction"),
            label_names=("entailment", "neutral", "contradiction"),
            parts=(("dev_matched", "validation_matched"), ("dev_mismatched", "validation_mismatched")),
        ),
    )
}


def read_glue(task: GlueTask, data: str | None) -> TaskData:
    """From a folder, the task's own or the one above it, or from the hub; without `data` from the hub's GLUE."""
    folder = None if data is None else local_path(data)
    if folder is None:
        return _from_hub(task, data or HUB_NAME)
    require_folder(folder, task.name)
    return _from_folder(task, subfolder_or_self(folder, task.folder))


def _from_folder(task: GlueTask, folder: Path) -> TaskData:
    files = {part: folder / f"{part}.tsv" for part in ("train", *(part for part, _ in task.parts))}
    for path in files.values():
        if not path.is_file():
            names = ", ".join(path.name for path in files.values())
            raise ConfigurationError(f"{path}: no such file (--task {task.name} reads {names})")
    records = {
        part: texts_of(read_tsv(path, task.columns), task.written_labels, pair_may_be_empty=task.pair_may_be_empty)
        for part, path in files.items()
    }
    return _task_data(task, records, str(folder))


def _from_hub(task: GlueTask, name: str) -> TaskData:
    splits, source = load_hub(name, task.name), f"{name} ({task.name})"
    records = {}
    for part, split in (("train", "train"), *task.parts):
        table = hub_table(splits, split, source, task.hub_columns)
        records[part] = texts_of(table, task.label_names, pair_may_be_empty=task.pair_may_be_empty)
    return _task_data(task, records, source)


def _task_data(task: GlueTask, records: dict[str, Texts], source: str) -> TaskData:
    evaluation: dict[str, Records] = {part: records[part] for part, _ in task.parts}
    return TaskData(records["train"], evaluation, task.label_names, source)
