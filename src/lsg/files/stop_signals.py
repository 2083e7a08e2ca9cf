"""SIGINT, SIGTERM and SIGHUP sent to the command line: an exception while a command works, the end of it otherwise.

A command that works has files open, which its `finally` blocks take back. Before and after there are none, and an
exception would only meet imports half done: the process ends at once, without a word. Python's standard library alone
is imported here, as this comes before everything else.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

_PATIENCE = 5.0  # seconds for the command's own way out; a second signal after them ends the process
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # not all of them everywhere
_LATER = 0.05  # seconds, until a destructor is left
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it
_asked = (0, 0.0)  # the signal by which a command was asked to stop, and when


class Stopped(KeyboardInterrupt):
    """The command was asked to stop. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def end_at_once() -> None:
    """From now on such a signal ends the process, with the exit code that shells give for it. Ignored ones stay so."""
    for number in _signals():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


@contextlib.contextmanager
def stopping_by_exception() -> Iterator[None]:
    """Within, such a signal raises `Stopped`, once. Does nothing in a process that is not the command's own."""
    own = [number for number in _signals() if signal.getsignal(number) is _end]
    before = sys.unraisablehook
    if own:
        sys.unraisablehook = _again
    for number in own:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr) if own else ():
            with contextlib.suppress(OSError, ValueError, AttributeError):  # None: it was closed from the start
                stream.flush()
        for number in own:
            signal.signal(number, _end)
        sys.unraisablehook = before


@contextlib.contextmanager
def ending_whatever_is_waited_for() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP end the process at once, also while a library waits: a handler of Python's runs only
    when that wait is over. For a time at which nothing is half done. Ignored signals stay so."""
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in _signals() if number is not signal.SIGINT}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def asked_to_stop() -> int:
    """The signal that this process got while a command worked, 0 without one: whatever an exception was made into."""
    return _asked[0]


def stop_if_asked() -> None:
    """Raises `Stopped` if a library has swallowed it."""
    if _asked[0]:
        raise Stopped(_asked[0])


def _signals() -> list[signal.Signals]:
    return [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def _end(number: int, frame: FrameType | None) -> None:
    if sys.stdout is not None and sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR)
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    global _asked
    if not _asked[0]:
        _asked = (number, time.monotonic())
        raise Stopped(number)
    if time.monotonic() - _asked[1] > _PATIENCE:
        _end(number, frame)


def _again(unraisable: Any) -> None:
    """Where the exception came up in a destructor or a callback, Python can only print it: it is raised anew, later."""
    global _asked
    stop = unraisable.exc_value
    if isinstance(stop, Stopped):
        _asked = (0, 0.0)
        again = threading.Timer(_LATER, os.kill, (os.getpid(), stop.number))
        again.daemon = True
        again.start()
    elif not _asked[0]:
        sys.__unraisablehook__(unraisable)
