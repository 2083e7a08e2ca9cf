"""The output folder of a search: what was drawn is written before the first run, and the scores after the last one.

search.json: the search and its plan. runs/001, ...: a folder of lsg.train a run. tuned.toml: the best settings.
model/, privacy.json: of a paid search, what may be released. scores.json: written last: the search is complete.
"""

import contextlib
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError
from lsg.files.atomic import write_atomic
from lsg.files.foreign_files import read_text
from lsg.files.foreign_text import to_json, visible
from lsg.files.foreign_values import json_value
from lsg.train.config_file import to_toml
from lsg.train.folder import RunFolder
from lsg.train.lock import held_folder, is_leftover
from lsg.tune.search import Plan, Search

_SECRET = (
    "SECRET where the data are: this file tells seeds, how many runs there were and how they scored. The guarantee is "
    "about the model, its settings and its noisy score alone."
)


class SearchFolder:
    """One search's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._drawn, self._scores = path / "search.json", path / "scores.json"

    @contextlib.contextmanager
    def held(self, *, resume: bool) -> Iterator[None]:
        """Keeps all other processes out."""
        with held_folder(self.path, partial(self._check, resume)):
            yield

    def _check(self, resume: bool) -> None:
        if self._drawn.is_file():
            if not resume:
                raise ConfigurationError(
                    f"--output {self.path} holds a search already: go on with it by --resume, or choose another folder"
                )
            return
        if resume:
            raise ConfigurationError(f"--resume: {self.path} holds no search to go on with")
        if self.path.exists() and not self.path.is_dir():
            raise ConfigurationError(f"--output {self.path} is not a folder")
        if self.path.exists() and not all(map(is_leftover, self.path.iterdir())):
            raise ConfigurationError(f"--output {self.path}: this folder is not empty and holds no search of lsg tune")

    def begin(self, search: Search, plan: Plan) -> None:
        self._write(self._drawn, {"search": search.to_dict(), "plan": plan.to_dict()})

    def begun(self) -> tuple[Search, Plan]:
        source = str(self._drawn)
        values = _read(self._drawn)
        try:
            return Search.from_dict(values["search"], source), Plan.from_dict(values["plan"], source)
        except (KeyError, TypeError) as error:
            raise ConfigurationError(f"{source} is damaged: it is no search ({error})") from None

    def run(self, number: int) -> Path:
        """The folder of one run, counted from 1."""
        return self.path / "runs" / f"{number:03d}"

    def withhold(self, number: int) -> None:
        """Remove what a run would release: it lost, or stood in for another."""
        shutil.rmtree(self.run(number) / "model", ignore_errors=True)
        self.withhold_statement(number)

    def withhold_statement(self, number: int) -> None:
        """Remove a run's own statement, which knows of no search: nobody may release a model with it."""
        (self.run(number) / "privacy.json").unlink(missing_ok=True)

    def release(self, winner: int, statement: dict[str, Any]) -> None:
        """The winner's model with the statement about the whole search."""
        own = RunFolder(self.path)
        own.write_model(partial(_copy, self.run(winner) / "model"))
        own.write_privacy(statement)

    def write_settings(self, settings: dict[str, Any], about: str) -> None:
        comment = "".join(f"# {visible(line)}\n" for line in about.splitlines())
        write_atomic(self.path / "tuned.toml", comment + to_toml(settings))

    def complete(self, outcome: dict[str, Any]) -> None:
        self._write(self._scores, outcome)

    def outcome(self) -> dict[str, Any] | None:
        """What `complete` wrote; None of a search that is not complete."""
        if not self._scores.is_file():
            return None
        return {key: value for key, value in _read(self._scores).items() if key != "secret"}

    def _write(self, path: Path, values: dict[str, Any]) -> None:
        write_atomic(path, to_json({"secret": _SECRET} | values, indent=2) + "\n", secret=True)


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json_value(read_text(path))
        if not isinstance(found, dict):
            raise ValueError("it holds no search")
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{path} is damaged: {error}") from None
    return found
