"""One run's folder for all processes that train it: rank 0 reads and writes, the others learn what came of it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lsg.distributed.group import Group
from lsg.train.config import RunConfig
from lsg.train.folder import RunFolder
from lsg.train.tensorboard import TensorBoard


class SharedFolder:
    """Rank 0's `RunFolder`, in the same words. Each call is a collective, but for `abandon`. An error of rank 0, a full
    disk say, is raised on all."""

    def __init__(self, folder: RunFolder, group: Group) -> None:
        self._folder, self.group = folder, group
        self.path, self.checkpoint, self.ledger = folder.path, folder.checkpoint, folder.ledger

    @contextlib.contextmanager
    def held(self, config: RunConfig, *, resume: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            self.group.on_first(lambda: stack.enter_context(self._folder.held(config, resume=resume)))
            yield

    def has(self, path: Path) -> bool:
        found: bool = self.group.on_first(path.exists)
        return found

    def create(self, config: RunConfig) -> None:
        self.group.on_first(lambda: self._folder.create(config))

    def abandon(self) -> None:
        """After an error, where ranks may be at different places."""
        if self.group.first:
            self._folder.abandon()

    def result(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.group.on_first(self._folder.result)
        return found

    def write_model(self, save: Callable[[Path], None]) -> None:
        self.group.on_first(lambda: self._folder.write_model(save))

    def write_privacy(self, statement: dict[str, Any]) -> None:
        self.group.on_first(lambda: self._folder.write_privacy(statement))

    def write_result(self, result: dict[str, Any]) -> None:
        self.group.on_first(lambda: self._folder.write_result(result))

    def drop_checkpoint(self) -> None:
        self.group.on_first(self._folder.drop_checkpoint)

    def metrics(self, rows: list[dict[str, Any]]) -> "SharedMetrics":
        return SharedMetrics(self._folder, self.group, rows)


class SharedMetrics:
    """metrics.jsonl and the TensorBoard log. rows: of the epochs before."""

    def __init__(self, folder: RunFolder, group: Group, rows: list[dict[str, Any]]) -> None:
        self._folder, self._group = folder, group
        self._board: TensorBoard | None = None
        group.on_first(lambda: self._begin(rows))

    def _begin(self, rows: list[dict[str, Any]]) -> None:
        self._folder.write_metrics(rows)
        self._board = TensorBoard(self._folder.tensorboard, rows)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """All rows so far, the last of which is new."""
        self._group.on_first(lambda: self._append(rows))

    def _append(self, rows: list[dict[str, Any]]) -> None:
        assert self._board is not None
        self._folder.write_metrics(rows)
        self._board.write(rows[-1])

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
