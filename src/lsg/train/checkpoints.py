"""Decides when a run writes a checkpoint: the state of the loop in, now and then a file out."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lsg.checkpoint import save_checkpoint
from lsg.engine import PrivacyEngine
from lsg.files.atomic import OWNER_ONLY_FOLDER, errors_naming
from lsg.train.loop import LoopState

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
