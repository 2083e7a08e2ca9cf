"""Decides when a run writes a checkpoint, and checks what one says: the state of the loop in, a file out, and back."""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from lsg.checkpoint import damage_named, save_checkpoint
from lsg.engine import PrivacyEngine
from lsg.files.atomic import OWNER_ONLY_FOLDER, errors_naming
from lsg.train.epoch_signals import SignalSums
from lsg.train.loop import LoopState
from lsg.train.stored_form import check_form, check_number

# After an epoch a checkpoint is written if this much time has gone by since the last one, and ten times what writing
# that one took: a run that is killed loses little, and one that is not spends little on it.
SECONDS_BETWEEN = 30.0
SHARE_OF_TIME = 0.1


class CheckpointWriter:
    """Decides when a checkpoint is worth writing, and writes it.

    epochs: of the whole run. every: steps between checkpoints within an epoch; 0: after epochs alone, when it is worth
    it. extra: what a continuation needs beside the engine's state.
    """

    def __init__(
        self,
        path: Path,
        engine: PrivacyEngine,
        *,
        epochs: int,
        every: int,
        extra: Callable[[LoopState], dict[str, Any]],
    ) -> None:
        self._path, self._engine, self._epochs, self._every, self._extra = path, engine, epochs, every, extra
        self._last, self._cost = time.perf_counter(), 0.0

    def save(self, state: LoopState) -> None:
        """Called by the loop after each epoch, and after every so many steps."""
        if state.epochs == self._epochs:
            return  # the result comes next
        if self._every or self._engine.run.group.on_first(self._worth_it):
            self.write(state)

    def write(self, state: LoopState) -> None:
        """At once. Every process has to call this."""
        started = time.perf_counter()
        with errors_naming(self._path):
            self._engine.run.group.on_first(lambda: self._path.parent.mkdir(mode=OWNER_ONLY_FOLDER, exist_ok=True))
            save_checkpoint(self._path, engine=self._engine, extra=self._extra(state))
        self._last = time.perf_counter()
        self._cost = self._last - started

    def _worth_it(self) -> bool:
        return time.perf_counter() - self._last >= max(SECONDS_BETWEEN, self._cost / SHARE_OF_TIME)


def restored_progress(
    extra: dict[str, Any], epochs: int, parts: Collection[str], path: Path
) -> tuple[LoopState, list[dict[str, Any]]]:
    """Where the loop stands and the rows of metrics so far. A file whose checksum fits may still be somebody's own.

    parts: of the evaluation data, which each row has a score of.
    """
    with damage_named(path):
        start, rows = LoopState(**extra["progress"]), [{**row} for row in extra["rows"]]
        check_form({**vars(start), "signals": None}, {**vars(LoopState()), "signals": None}, "its progress")
        if start.signals:
            check_form(start.signals, SignalSums().read(), "its progress")
        if not start.epochs == len(rows) < epochs:
            raise ValueError(f"{len(rows)} rows of metrics after {start.epochs} of {epochs} epochs")
        for number, row in enumerate(rows, 1):
            _check_row(row, number, parts)
    return start, rows


def _check_row(row: dict[str, Any], number: int, parts: Collection[str]) -> None:
    what = f"row {number} of its metrics"
    if row["epoch"] != number or row["scores"].keys() != set(parts):
        raise ValueError(f"{what} is none")
    for key in ("epoch", "steps"):
        check_number(row[key], f"{what}, {key}", whole=True)
    for score in row["scores"].values():
        check_number(score, f"{what}, a score")
    for key in ("score", "seconds", "samples_per_second"):
        check_number(row[key], f"{what}, {key}")
    for key in ("loss", "epsilon"):  # null: not finite
        if row[key] is not None:
            check_number(row[key], f"{what}, {key}")
    for key in ("lr", "clip_share", "signal_norm", "noise_norm", "update_norm"):  # rows of older versions lack some
        if row.get(key) is not None:
            check_number(row[key], f"{what}, {key}")
