"""Tells whoever waits at the command line what is being done: what works now in, lines out.

A thread looks at when the last text went out, which every printer says by `spoken`, and at what is being done, which
`doing` says. Nothing is told before `tell_waits`: the library is silent. Python's standard library alone is imported
here, as this begins before everything else.
"""

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

FIRST = 0.6  # seconds until the first line of a command, on a terminal
WAIT = 3.0  # seconds without a word that are told of
LONGEST = 60.0  # seconds between two lines about the same
_LOOK = 0.1  # seconds between two looks

What = str | Callable[[], str]


class Waits:
    """When a line is due, and what it says. now: seconds, of a clock that never goes back. first: until a line."""

    def __init__(self, now: float, first: float) -> None:
        self._first: float | None = first  # None once there was one
        self._last = now
        self._doing: list[tuple[What, float]] = [("at work", now)]
        self._pauses: dict[str, float] = {}  # of each thing that was told, until it is told again

    def spoken(self, now: float) -> None:
        """A text went out: the next wait begins."""
        self._first, self._last = None, now

    def begins(self, what: What, now: float) -> None:
        self._doing.append((what, now))

    def ends(self) -> None:
        self._doing.pop()

    def due(self, now: float, loading: Callable[[], str] = lambda: "") -> str:
        """The line to tell now, if it is time for one: again about the same, it takes twice as long each time.

        loading: in words, if that is what takes so long.
        """
        if now - self._last < min(WAIT, self._first or WAIT):
            return ""
        what, began = self._doing[-1]
        imported = loading()
        kind = imported or (what if isinstance(what, str) else "progress")
        pause = self._pauses.get(kind, WAIT)
        if now - self._last < (pause if self._first is None else self._first):
            return ""
        self._pauses[kind] = pause if self._first is not None else min(2 * pause, LONGEST)
        self.spoken(now)
        shown = imported or (what if isinstance(what, str) else what())
        return shown if now - began < WAIT else f"{shown} ({now - began:.0f} s)"


_waits: Waits | None = None


def tell_waits(say: Callable[[str], None]) -> None:
    """From now on, to the end of this process. say: shows a line on stderr."""
    global _waits
    _waits = waits = Waits(time.monotonic(), FIRST if sys.stderr is not None and sys.stderr.isatty() else WAIT)
    ending = threading.Event()

    def look() -> None:
        while not ending.wait(_LOOK):
            if line := waits.due(time.monotonic(), _loading):
                with contextlib.suppress(OSError, ValueError):  # a stream that was closed
                    say(f"lsg: {line}")

    thread = threading.Thread(target=look, name="lsg waits", daemon=True)
    thread.start()

    def end() -> None:
        ending.set()
        thread.join()

    atexit.register(end)  # a thread that prints while Python ends would crash it


def spoken() -> None:
    """Every printer calls this."""
    if _waits is not None:
        _waits.spoken(time.monotonic())


@contextlib.contextmanager
def doing(what: What) -> Iterator[None]:
    """Within, a wait is told in these words. A function's are asked for when a line is due."""
    waits = _waits
    if waits is None:
        yield
        return
    waits.begins(what, time.monotonic())
    try:
        yield
    finally:
        waits.ends()


def _loading() -> str:
    """Which package is being imported at this moment."""
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if (name == package or package == "lsg") and getattr(getattr(module, "__spec__", None), "_initializing", False):
            return f"loading {package}"
    return ""
