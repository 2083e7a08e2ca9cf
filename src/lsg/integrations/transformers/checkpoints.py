"""Checkpoint folders of a Trainer: which of them a private run can go on from."""

from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lsg.errors import ConfigurationError
from lsg.files.foreign_files import read_text
from lsg.files.foreign_values import json_value

RUN_FILE = "private_run.safetensors"  # weights, optimizer, scheduler and engine, by `lsg.save_checkpoint`
_STATE_FILE = "trainer_state.json"  # Trainer writes it last


def is_complete(folder: Path) -> bool:
    """Whether a folder was written to its end. Whoever is killed while writing leaves one that was not."""
    try:
        json_value(read_text(folder / _STATE_FILE))
    except (OSError, ValueError):
        return False
    return (folder / RUN_FILE).exists()


def last_complete(run: Path) -> Path:
    """The latest checkpoint in a run's folder that was written to its end."""
    found = [
        (int(number), folder)
        for folder in run.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (number := folder.name.rpartition("-")[2]).isdigit() and is_complete(folder)
    ]
    if not found:
        raise ConfigurationError(
            f"'{run}' holds no checkpoint of a private run that was written to its end: resume_from_checkpoint=True "
            "has nothing to go on from"
        )
    return max(found)[1]


def check_complete(folder: Path) -> None:
    if not is_complete(folder):
        missing = RUN_FILE if (folder / _STATE_FILE).exists() else _STATE_FILE
        raise ConfigurationError(
            f"checkpoint '{folder}' has no whole {missing}, which says what the run has spent and where its random "
            "streams stand (it was made by a plain Trainer, with save_only_model=True, or not written to its end): a "
            "private run cannot go on from it"
        )
