"""A process that ends, or raises an error of lsg's, tells the others why, so that they end with its reason and at once.

A process that is killed tells nothing; the others learn from their broken connection to it that it is gone.
"""

import sys
from multiprocessing.util import Finalize
from types import TracebackType

from lsg.distributed.notes import Notes
from lsg.errors import ProcessLost, first_line

_notes: Notes | None = None  # of the process group that was in use last
_hooked = False


def notes_of_this_process() -> Notes | None:
    """Those that this process writes to, the same ones as long as there is one process group."""
    global _notes
    found = Notes.current()
    if found is None:
        return None
    if _notes is None or _notes.store is not found.store:
        _notes = found
        _tell_ends()
    return _notes


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def tell(error: BaseException) -> None:
    """This process ends because of an error. One because of another process's end only repeats what that one told."""
    if _notes is not None and not isinstance(error, ProcessLost):
        _notes.ends(in_words(error))
        _notes.stay_for_others()


def _tell_ends() -> None:
    """From now on the end of this process is told, and the error that ends it."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _notes is not None:
            _notes.ends(in_words(error))
            _notes.stay_for_others()
        before(kind, error, trace)

    sys.excepthook = hook
    # Runs at the end of a child of multiprocessing, too, where neither the hook nor `atexit` does.
    Finalize(None, _end, exitpriority=0)


def _end() -> None:
    if _notes is not None:
        _notes.ends()
