"""Waits for collectives of one process group, and gives up with a reason where another rank will not come.

torch's own wait ends at a timeout, half an hour by default, and Ctrl-C does not reach it. This one looks now and then
whether others have left a note, and for how the connection is.
"""

import ctypes
import time
from typing import Any

from lsg.distributed.notes import At, Notes, Reason
from lsg.errors import ProcessLost, first_line

_LOOK = 0.5  # seconds between two looks for notes
_GRACE = 2.0  # seconds for a rank to come after all, or for a reason to be written
_NAP = 0.002  # seconds at most between two looks whether all have come


class Waiting:
    """rank: this one."""

    def __init__(self, notes: Notes, rank: int) -> None:
        self.notes, self._rank = notes, rank
        self._given_up: str | None = None

    def check(self) -> None:
        """Refuse a collective after one that was given up: it would meet that one's messages."""
        if self._given_up is not None:
            raise ProcessLost(f"{self._given_up} (Begin again with a new process group)")

    def done(self, work: Any, group: Any, what: str, at: At) -> None:
        """Wait until an asynchronous collective of `group` is done. what: it waits for, in words. at: where this
        rank is, to know which notes are about that."""
        error: RuntimeError | None = None
        try:
            reasons = self._reasons_to_give_up(work, at)
            if not reasons:
                work.wait()
                return
        except RuntimeError as broken:
            error, reasons = broken, self._reasons_in_time(at)
        finally:
            if not work.is_completed():
                self._given_up = f"rank {self._rank} had given up waiting for {what}"
                _keep_for_ever(group)
        why = "; ".join(map(str, reasons)) or f"another process was lost ({first_line(error) if error else ''})"
        self._given_up = f"training ends on rank {self._rank}, which waited for {what} in vain. {why}"
        if reasons:
            self.notes.stay_for_others()
        raise ProcessLost(self._given_up) from (None if reasons else error)

    def _reasons_to_give_up(self, work: Any, at: At) -> list[Reason]:
        """None when the work is done."""
        began = looked = time.monotonic()
        seen: dict[Reason, float] = {}
        while not work.is_completed():
            now = time.monotonic()
            time.sleep(min(_NAP, (now - began) / 20))
            if now - looked < _LOOK:
                continue
            looked = now
            seen = {reason: seen.get(reason, now) for reason in self.notes.reasons(at)}
            if any(reason.final or now - since >= _GRACE for reason, since in seen.items()):
                return list(seen)
        return []

    def _reasons_in_time(self, at: At) -> list[Reason]:
        """Waited for a little: a connection breaks faster than a reason is written."""
        deadline = time.monotonic() + _GRACE
        while True:
            reasons = self.notes.reasons(at)
            if any(reason.final for reason in reasons) or time.monotonic() > deadline:
                return reasons
            time.sleep(0.05)


def _keep_for_ever(group: Any) -> None:
    """The end of a group waits until its collectives are done, and a process ends with its groups."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
