"""How far the reading of a file is: readers say how many bytes or files are done, whoever waits for them is told.

Readers take paths and return data; who is to be told is set around them, by `told_to`.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

PATIENCE = 2.5  # seconds of reading without a word; after 3 the command line says that it is at work
Report = Callable[[str, int, int], None]  # what is read, how much is done, of how much

_REPORT: ContextVar[Report | None] = ContextVar("report", default=None)


@contextlib.contextmanager
def told_to(report: Report) -> Iterator[None]:
    """Within, `report` is called of each reading that takes longer than PATIENCE; at its end with all of it done."""
    before = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(before)


class Reading:
    """One reading. what: in words; total: of bytes, files or rows."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._began, self._told = what, total, time.monotonic(), False

    def at(self, done: int) -> None:
        report = _REPORT.get()
        if report is None or not self._total:
            return
        if self._told or (done < self._total and time.monotonic() - self._began > PATIENCE):
            self._told = True
            report(self._what, min(done, self._total), self._total)

    def end(self) -> None:
        if self._told:
            self.at(self._total)
            self._told = False
