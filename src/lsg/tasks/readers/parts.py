"""Anyone's texts, as tables: a file, a folder with parts for training and evaluation, or a hub name comes in."""

from dataclasses import dataclass
from pathlib import Path

from lsg.errors import ConfigurationError
from lsg.files.foreign_text import listed
from lsg.tasks.readers.columns import Wanted
from lsg.tasks.readers.files import local_path
from lsg.tasks.readers.hub import hub_table, load_hub
from lsg.tasks.readers.tables import FORMATS, Table, read_table

# The first of these that is there is the evaluation data. Test parts come last: often they have no labels.
EVALUATION_PARTS = ("dev", "validation", "val", "valid", "test")


@dataclass(frozen=True)
class Parts:
    """source: the path or hub name. evaluation: None of data that come in one part; part: its name."""

    source: str
    training: Table
    part: str = ""
    evaluation: Table | None = None


def read_parts(data: str, wanted: Wanted) -> Parts:
    """data: what --data names."""
    path = local_path(data)
    if path is None:
        if Path(data).suffix.lower() in FORMATS:
            raise ConfigurationError(f"--data {data}: no such file")
        return _from_hub(data, wanted)
    return _from_folder(path, wanted) if path.is_dir() else Parts(str(path), read_table(path, wanted))


def _from_folder(folder: Path, wanted: Wanted) -> Parts:
    train = _part(folder, "train")
    part, path = next(((part, path) for part in EVALUATION_PARTS if (path := _part(folder, part))), (None, None))
    if train is None or part is None or path is None:
        raise ConfigurationError(
            f"{folder}: no {'train' if train is None else 'dev'} file; a folder of texts holds train.* and one of "
            f"{', '.join(f'{part}.*' for part in EVALUATION_PARTS)}, with a suffix of {', '.join(FORMATS)}"
        )
    training = read_table(train, wanted)
    return Parts(str(folder), training, part, read_table(path, wanted.again(training.columns)))


def _part(folder: Path, name: str) -> Path | None:
    files = sorted(path for path in folder.glob(f"{name}.*") if path.suffix.lower() in FORMATS)
    if len(files) > 1:
        raise ConfigurationError(f"{folder}: which is the {name} file? There are {listed(path.name for path in files)}")
    return files[0] if files else None


def _from_hub(name: str, wanted: Wanted) -> Parts:
    splits = load_hub(name)
    part = next((part for part in EVALUATION_PARTS if part in splits), None)
    if part is None:
        raise ConfigurationError(f"{name}: none of the splits {', '.join(EVALUATION_PARTS)}; it has {listed(splits)}")
    training = hub_table(splits, "train", name, wanted)
    return Parts(name, training, part, hub_table(splits, part, name, wanted.again(training.columns)))
