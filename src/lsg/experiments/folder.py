"""The output folder of a run: every file is written whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError
from lsg.experiments.config import RunConfig, option
from lsg.experiments.config_file import read_settings, to_toml
from lsg.files import UNFINISHED, naming, write_whole


class RunFolder:
    """One run's files. `checkpoint` (a file) and `tensorboard` (a folder) are written by others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint" / "state.safetensors"
        self.tensorboard = path / "tensorboard"
        self._was_there = False

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Refuse a folder that cannot be written or that holds something else. Writes nothing."""
        existing = self.path
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            raise ConfigurationError(f"--output {self.path}: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigurationError(f"--output {self.path}: cannot write into {existing}")
        if not self.path.exists() or all(entry.name.endswith(UNFINISHED) for entry in self.path.iterdir()):
            return
        if not (self.path / "config.toml").is_file():
            raise ConfigurationError(f"--output {self.path}: this folder is not empty and holds no run of lsg train")
        if not resume:
            raise ConfigurationError(
                f"--output {self.path} holds a run already: go on with it by --resume, or choose another folder"
            )
        self._check_same(config)
        self._was_there = True

    def _check_same(self, config: RunConfig) -> None:
        begun, wanted = read_settings(self.path / "config.toml"), config.to_dict()
        differing = [key for key in sorted(begun.keys() | wanted.keys()) if begun.get(key) != wanted.get(key)]
        if differing:
            told = ", ".join(f"{option(key)} {begun.get(key)} (now {wanted.get(key)})" for key in differing)
            raise ConfigurationError(f"--resume: the run in {self.path} was begun with {told}")

    def create(self, config: RunConfig) -> None:
        with naming(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        begun = (self.path / "config.toml").is_file()
        if begun and not self._was_there:
            raise ConfigurationError(f"--output {self.path}: another process has begun a run there meanwhile")
        if not begun:
            write_whole(self.path / "config.toml", to_toml(config.to_dict()))

    def abandon(self) -> None:
        """Remove a run that has only begun, unless it was there before."""
        if self._was_there:
            return
        for name in ("config.toml", "metrics.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.tensorboard, ignore_errors=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def result(self) -> dict[str, Any] | None:
        """What a complete run left, None of one that is not complete."""
        path = self.path / "result.json"
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{path} is damaged: {error}") from None
        if not isinstance(found, dict):
            raise ConfigurationError(f"{path} is damaged: it holds no result of a run")
        return found

    def write_metrics(self, rows: list[dict[str, Any]]) -> None:
        write_whole(self.path / "metrics.jsonl", "".join(_json(row) + "\n" for row in rows))

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        write_whole(self.path / name, _json(value, indent=2) + "\n")

    def write_model(self, save: Callable[[Path], None]) -> None:
        """save: writes into a folder that it makes itself."""
        target, partial = self.path / "model", self.path / ("model" + UNFINISHED)
        with naming(target):
            try:
                shutil.rmtree(partial, ignore_errors=True)
                save(partial)
                shutil.rmtree(target, ignore_errors=True)
                partial.replace(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def drop_checkpoint(self) -> None:
        shutil.rmtree(self.checkpoint.parent, ignore_errors=True)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
