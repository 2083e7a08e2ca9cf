"""Anyone's texts: one table, or a folder with a table for training and one for evaluation, or a hub name, comes in."""

from pathlib import Path

from lsg.errors import ConfigurationError
from lsg.files.foreign_text import listed
from lsg.tasks.data import TaskData
from lsg.tasks.readers.columns import WantedColumns
from lsg.tasks.readers.files import local_path
from lsg.tasks.readers.hub import hub_table, load_hub
from lsg.tasks.readers.records import label_names, texts_of
from lsg.tasks.readers.tables import FORMATS, Table, read_table
from lsg.tasks.split import hold_out

# The first of these that is there is the evaluation data. Test parts come last: often they have no labels.
EVALUATION_PARTS = ("dev", "validation", "val", "valid", "test")


def read_text_task(data: str, wanted: WantedColumns) -> TaskData:
    path = local_path(data)
    if path is None:
        if Path(data).suffix.lower() in FORMATS:
            raise ConfigurationError(f"--data {data}: no such file")
        return _from_hub(data, wanted)
    return _from_folder(path, wanted) if path.is_dir() else _from_file(path, wanted)


def _from_file(path: Path, wanted: WantedColumns) -> TaskData:
    table = read_table(path, wanted)
    names = label_names(table)
    return hold_out(texts_of(table, names), names, str(path))


def _from_folder(folder: Path, wanted: WantedColumns) -> TaskData:
    train = _part(folder, "train")
    part, path = next(((part, path) for part in EVALUATION_PARTS if (path := _part(folder, part))), (None, None))
    if train is None or part is None or path is None:
        raise ConfigurationError(
            f"{folder}: no {'train' if train is None else 'dev'} file; a folder of texts holds train.* and one of "
            f"{', '.join(f'{part}.*' for part in EVALUATION_PARTS)}, with a suffix of {', '.join(FORMATS)}"
        )
    training = read_table(train, wanted)
    return _task_data(training, part, read_table(path, _same_columns(training)), str(folder))


def _part(folder: Path, name: str) -> Path | None:
    files = sorted(path for path in folder.glob(f"{name}.*") if path.suffix.lower() in FORMATS)
    if len(files) > 1:
        raise ConfigurationError(f"{folder}: which is the {name} file? There are {listed(path.name for path in files)}")
    return files[0] if files else None


def _from_hub(name: str, wanted: WantedColumns) -> TaskData:
    splits = load_hub(name)
    part = next((part for part in EVALUATION_PARTS if part in splits), None)
    if part is None:
        raise ConfigurationError(f"{name}: none of the splits {', '.join(EVALUATION_PARTS)}; it has {listed(splits)}")
    training = hub_table(splits, "train", name, wanted)
    return _task_data(training, part, hub_table(splits, part, name, _same_columns(training)), name)


def _same_columns(training: Table) -> WantedColumns:
    """Of the evaluation data; whose records those are does not matter."""
    return WantedColumns(training.columns.text, training.columns.pair, training.columns.label)


def _task_data(training: Table, part: str, evaluation: Table, source: str) -> TaskData:
    names = label_names(training)
    return TaskData(texts_of(training, names), {part: texts_of(evaluation, names)}, names, source)
