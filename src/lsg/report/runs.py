"""Reads output folders of training runs: paths in, `StoredRun`s out. Nothing in those files is trusted to be sane."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError
from lsg.files.foreign_files import read_text
from lsg.files.foreign_values import json_value, toml_value
from lsg.tasks.measures import ACCURACY, Measure, measure_of

RESULT, METRICS, CONFIG, PRIVACY = "result.json", "metrics.jsonl", "config.toml", "privacy.json"
_LARGEST = 1e100  # anything beyond is as good as infinite, and its sums would overflow


@dataclass(frozen=True)
class Epoch:
    """A row of a run's history. epsilon: None is infinite. score: a fraction, or a perplexity. Numbers that are
    not finite are None.

    loss, clip_share and signal_norm are not private. The last three are None in runs of older versions.
    """

    epoch: int
    epsilon: float | None
    score: float | None
    loss: float | None
    clip_share: float | None = None
    signal_norm: float | None = None
    noise_norm: float | None = None


@dataclass(frozen=True)
class StoredRun:
    """complete: it has a result; otherwise the numbers are those of its last epoch so far, and it has no warnings."""

    name: str
    folder: Path
    complete: bool
    config: dict[str, Any]
    score: float | None
    scores: dict[str, float]
    epsilon: float | None
    noise_multiplier: float | None
    seconds: float | None
    history: tuple[Epoch, ...]
    privacy: dict[str, Any]
    provenance: dict[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def measure(self) -> Measure:
        """What its scores are."""
        return measure_of(self.config.get("task"))

    @property
    def loss(self) -> float | None:
        """Of the last epoch's training records. Not private."""
        return self.history[-1].loss if self.history else None


def find_runs(paths: Sequence[Path]) -> list[StoredRun]:
    """The runs at and below these folders, each once, in the order of their paths."""
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise ConfigurationError(f"{path}: {'not a folder' if path.exists() else 'there is no such folder'}")
        found = [folder.resolve() for folder in _run_folders(path)]
        if not found:
            raise ConfigurationError(f"{path}: holds no run, that is no folder with {RESULT} or {METRICS}")
        folders |= dict.fromkeys(found)
    root = Path(os.path.commonpath(folders)) if len(folders) > 1 else next(iter(folders)).parent
    return [_read(folder, str(folder.relative_to(root))) for folder in folders]


def _run_folders(path: Path) -> list[Path]:
    found = []
    for folder, below, files in os.walk(path):
        below.sort()
        if RESULT in files or METRICS in files:
            found.append(Path(folder))
            below.clear()  # what a run keeps inside (model, checkpoint) is no run
    return found


def _read(folder: Path, name: str) -> StoredRun:
    return _read_complete(folder, name) if (folder / RESULT).exists() else _read_incomplete(folder, name)


def _read_complete(folder: Path, name: str) -> StoredRun:
    file = folder / RESULT
    result = _object(_json(file), file, "the file")
    for key in ("config", "score", "history"):
        if key not in result:
            raise ConfigurationError(f"{file}: '{key}' is missing")
    rows = result["history"]
    if not isinstance(rows, list):
        raise ConfigurationError(f"{file}: 'history' must be a list")
    scores = _object(result.get("scores", {}), file, "'scores'")
    config = _object(result["config"], file, "'config'")
    measure = measure_of(config.get("task"))
    return StoredRun(
        name=name,
        folder=folder,
        complete=True,
        config=config,
        score=_score(result, "score", file, measure),
        scores={part: score for part in scores if (score := _score(scores, part, file, measure)) is not None},
        epsilon=_amount(result, "epsilon", file),
        noise_multiplier=_amount(result, "noise_multiplier", file),
        seconds=_amount(result, "seconds", file),
        history=_history([(f"{file}: history row {i}", row) for i, row in enumerate(rows, 1)], measure),
        privacy=_privacy(result.get("privacy") or {}, file, "'privacy'"),
        provenance=_object(result.get("provenance") or {}, file, "'provenance'"),
        warnings=_texts(result, "warnings", file),
    )


def _read_incomplete(folder: Path, name: str) -> StoredRun:
    rows = _json_lines(folder / METRICS)
    config = _config(folder / CONFIG)
    history = _history(rows, measure_of(config.get("task")))
    last = history[-1] if history else Epoch(0, 0.0, None, None)
    seconds = [_amount(row, "seconds", where) for where, row in rows]
    privacy = folder / PRIVACY
    return StoredRun(
        name=name,
        folder=folder,
        complete=False,
        config=config,
        score=last.score,
        scores={},
        epsilon=last.epsilon,
        noise_multiplier=None,
        seconds=sum(s for s in seconds if s is not None),
        history=history,
        privacy=_privacy(_json(privacy), privacy, "the file") if privacy.exists() else {},
        provenance={},
    )


def _history(rows: Sequence[tuple[Path | str, Any]], measure: Measure) -> tuple[Epoch, ...]:
    """In the order of epochs. A run that was resumed may have written one twice: the last counts."""
    epochs = {}
    for where, row in rows:
        row = _object(row, where, "it")
        number = row.get("epoch")
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ConfigurationError(f"{where}: 'epoch' must be a whole number, not {number!r}")
        epochs[number] = Epoch(
            number,
            epsilon=_amount(row, "epsilon", where),
            score=_score(row, "score", where, measure),
            loss=_number(row, "loss", where),
            clip_share=_fraction(row, "clip_share", where),
            signal_norm=_number(row, "signal_norm", where),
            noise_norm=_number(row, "noise_norm", where),
        )
    return tuple(epochs[number] for number in sorted(epochs))


# --- files ------------------------------------------------------------------------------------------------------------


def _parse(text: str) -> Any:
    """NaN and the infinities, which are not JSON but which a run that diverged may have written, are None."""
    return json_value(text, parse_constant=lambda _: None)


def _json(file: Path) -> Any:
    text = read_text(file)
    try:
        return _parse(text)
    except JSONDecodeError as error:
        raise ConfigurationError(f"{file}: not valid JSON (line {error.lineno}: {error.msg})") from None
    except ValueError as error:  # a number of thousands of digits, thousands of brackets
        raise ConfigurationError(f"{file}: not JSON that can be read ({error})") from None


def _json_lines(file: Path) -> list[tuple[str, Any]]:
    """(where, row). A last line without its end is left out: the run was killed, or is still writing it."""
    rows = []
    lines = read_text(file).split("\n")
    for number, line in enumerate(lines, 1):
        where = f"{file}: line {number}"
        try:
            if line.strip():
                rows.append((where, _object(_parse(line), where, "it")))
        except ValueError:  # ConfigurationError is a ValueError, too
            if number < len(lines):
                raise ConfigurationError(f"{where} is not a JSON object") from None
    return rows


def _config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    text = read_text(file)
    try:
        return toml_value(text)
    except ValueError as error:
        raise ConfigurationError(f"{file}: not valid TOML ({error})") from None


def _object(value: Any, where: Path | str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where}: {what} must be a JSON object, not {type(value).__name__}")
    return value


def _number(values: dict[str, Any], key: str, where: Path | str) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigurationError(f"{where}: '{key}' must be a number or null, not {value!r:.80}")
    return float(value) if -_LARGEST < value < _LARGEST else None


def _amount(values: dict[str, Any], key: str, where: Path | str) -> float | None:
    """A number that is never below 0: an ε that is would look better than any guarantee."""
    value = _number(values, key, where)
    if value is not None and value < 0:
        raise ConfigurationError(f"{where}: '{key}' must be 0 or more, not {value:g}")
    return value


def _privacy(values: Any, where: Path | str, what: str) -> dict[str, Any]:
    """What a run says about its privacy, with numbers that can be such."""
    found = _object(values, where, what)
    for key in ("epsilon", "noise_multiplier"):
        _amount(found, key, where)
    _fraction(found, "delta", where)
    return found


def _fraction(values: dict[str, Any], key: str, where: Path | str) -> float | None:
    value = _number(values, key, where)
    if value is not None and not 0 <= value <= 1:
        raise ConfigurationError(f"{where}: '{key}' must be a fraction from 0 to 1, not {value:g}")
    return value


def _score(values: dict[str, Any], key: str, where: Path | str, measure: Measure) -> float | None:
    return _fraction(values, key, where) if measure is ACCURACY else _amount(values, key, where)


def _texts(values: dict[str, Any], key: str, where: Path | str) -> tuple[str, ...]:
    found = values.get(key, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ConfigurationError(f"{where}: '{key}' must be a list of texts")
    return tuple(found)
