"""The output folder of a run: every file is written whole or not at all, and one process at a time works in it.

Nothing is removed before what takes its place is known to be good. Files that hold the seed, random states or losses
can be read by their owner alone.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError
from lsg.files.atomic import UNFINISHED, errors_naming, sync_folder, sync_tree, write_atomic
from lsg.files.foreign_files import read_text
from lsg.files.foreign_text import to_json
from lsg.files.foreign_values import json_value
from lsg.train.config import RunConfig, option
from lsg.train.config_file import read_settings, to_toml
from lsg.train.lock import held_folder, is_leftover
from lsg.train.stored_settings import HOW_COMPUTED, computed_as, differences, stored_config

SECRET = (
    "SECRET where the data are: this file holds the seed. Whoever knows it can compute the noise and take it off. "
    "Release model/ and privacy.json alone."
)


class RunFolder:
    """One run's files. `checkpoint` and `ledger` (files) and `tensorboard` (a folder) are written by others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint" / "state.safetensors"
        self.ledger = path / "ledger"
        self.tensorboard = path / "tensorboard"
        self._was_there = False

    @contextlib.contextmanager
    def held(self, config: RunConfig, *, resume: bool) -> Iterator[None]:
        """Keeps all other processes out, from `check` to the end."""
        with held_folder(self.path, partial(self.check, config, resume=resume)):
            yield

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Refuse a folder that cannot be written or that holds something else. Writes nothing."""
        self.check_place(resume=resume)
        begun = self.begun()
        if begun is not None:
            self._check_same(begun, config)
            self._was_there = True

    def check_place(self, *, resume: bool) -> None:
        """What can be said of the folder before a run's settings are known."""
        try:
            str(self.path.absolute()).encode()
        except UnicodeEncodeError:  # libraries that save models and tokenizers want names in UTF-8
            raise ConfigurationError(
                f"--output {self.path}: the name is not in the encoding of file names here "
                f"({sys.getfilesystemencoding()}): choose another, or set PYTHONUTF8=1"
            ) from None
        existing = self.path
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            raise ConfigurationError(f"--output {self.path}: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigurationError(f"--output {self.path}: cannot write into {existing}")
        if not self.path.exists() or all(map(is_leftover, self.path.iterdir())):
            return
        if not (self.path / "config.toml").is_file():
            raise ConfigurationError(f"--output {self.path}: this folder is not empty and holds no run of lsg train")
        if not resume:
            raise ConfigurationError(
                f"--output {self.path} holds a run already: go on with it by --resume, or choose another folder"
            )

    def begun(self) -> RunConfig | None:
        """What the run in this folder was begun with; None where there is none."""
        file = self.path / "config.toml"
        return stored_config(read_settings(file), str(file)) if file.is_file() else None

    def going_on(self, config: RunConfig) -> RunConfig:
        """The configuration; what it leaves open about how it is computed is as the run was begun with."""
        begun = self.begun()
        left_open = [name for name in HOW_COMPUTED if getattr(config, name) is None]
        return config if begun is None else computed_as(begun, config, left_open)

    def _check_same(self, begun: RunConfig, config: RunConfig) -> None:
        differing = differences(begun, config)
        if differing:
            told = ", ".join(f"{option(key)} {before} (now {now})" for key, (before, now) in differing.items())
            raise ConfigurationError(f"--resume: the run in {self.path} was begun with {told}")

    def create(self, config: RunConfig) -> None:
        """Write what the run is begun with, unless it is there already. Needs the folder to be `held`."""
        if not self._was_there:
            write_atomic(self.path / "config.toml", f"# {SECRET}\n{to_toml(config.to_dict())}", secret=True)

    def abandon(self) -> None:
        """Remove a run that has only begun, unless it was there before."""
        if self._was_there:
            return
        for name in ("config.toml", "metrics.jsonl", "ledger"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint.parent, ignore_errors=True)
        shutil.rmtree(self.tensorboard, ignore_errors=True)

    def result(self) -> dict[str, Any] | None:
        """What a complete run left, None of one that is not complete."""
        path = self.path / "result.json"
        if not path.is_file():
            return None
        try:
            found = json_value(read_text(path))
            if not isinstance(found, dict):
                raise ValueError("it holds no result of a run")
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(f"{path} is damaged: {error}") from None
        return found

    def write_metrics(self, rows: list[dict[str, Any]]) -> None:
        write_atomic(self.path / "metrics.jsonl", "".join(to_json(row) + "\n" for row in rows), secret=True)

    def write_privacy(self, statement: dict[str, Any]) -> None:
        """The one file beside the model that is made to be released."""
        write_atomic(self.path / "privacy.json", to_json(statement, indent=2) + "\n")

    def write_result(self, result: dict[str, Any]) -> None:
        write_atomic(self.path / "result.json", to_json({"secret": SECRET} | result, indent=2) + "\n", secret=True)

    def write_model(self, save: Callable[[Path], None]) -> None:
        """save: writes into a folder that it makes itself."""
        target, unfinished = self.path / "model", self.path / ("model" + UNFINISHED)
        earlier = self.path / ("model.earlier" + UNFINISHED)
        with errors_naming(target):
            try:
                shutil.rmtree(unfinished, ignore_errors=True)
                save(unfinished)
                sync_tree(unfinished)
                if target.exists():
                    shutil.rmtree(earlier, ignore_errors=True)
                    target.replace(earlier)
                unfinished.replace(target)
                sync_folder(self.path)
            finally:
                if earlier.exists() and not target.exists():  # stopped between the two
                    earlier.replace(target)
                shutil.rmtree(earlier, ignore_errors=True)
                shutil.rmtree(unfinished, ignore_errors=True)

    def drop_checkpoint(self) -> None:
        """Once the model and a result that can be read are there: until then the checkpoint is all there is."""
        if (self.path / "model").is_dir() and self.result() is not None:
            shutil.rmtree(self.checkpoint.parent, ignore_errors=True)
