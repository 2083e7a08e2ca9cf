"""What ranks tell each other apart from collectives: why one will not come to where the others wait for it.

Notes lie in the store that torch.distributed met at. There are three kinds: a process ends; it raised an error and may
go on all the same; it left a loop over the loader before the loop's end.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from lsg.files.foreign_text import to_json
from lsg.files.foreign_values import json_value

_READING = 1.0  # seconds
_ANY = "lsg/notes"  # there once any rank has left a note: one question is enough as long as there are none
_ENDED, _RAISED, _LEFT = "ended", "raised", "left"


class At(NamedTuple):
    """Where a rank is: the number of the run, and of its loop over the loader; None outside of one."""

    run: int = 0
    loop: int | None = None


class Reason(NamedTuple):
    """Why a rank will not come. final: its process ends; otherwise it may still come."""

    rank: int | None
    text: str
    final: bool

    def __str__(self) -> str:
        return self.text if self.rank is None else f"rank {self.rank}: {self.text}"


_NO_STORE = Reason(None, "another process was lost: the one that held torch.distributed's store", final=True)


class Notes:
    """Those of a process group. No method raises: a store goes with the process that holds it."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self._rank, self._size = store, rank, size
        self._gone = False  # the store went with its process
        self._told: dict[str, str] = {}  # by this rank: kind -> why

    @classmethod
    def current(cls) -> "Notes | None":
        """None where there are no others to tell."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())

    def ends(self, why: str | None = None) -> None:
        """This process ends. Where nobody says why, it is for what was told before."""
        if _ENDED not in self._told:
            before = self._told.get(_RAISED) or self._told.get(_LEFT)
            self._tell(_ENDED, why or before or "its program ended")

    def stay_for_others(self) -> None:
        """Rank 0 is about to end, and the store may end with it: let the others read what lies there."""
        if self._rank == 0:
            time.sleep(_READING)

    def raised(self, at: At, why: str) -> None:
        """An error came out of lsg there; whether this rank comes all the same is not known."""
        self._tell(_RAISED, why, at)

    def left(self, at: At, why: str) -> None:
        """That loop was left before its end."""
        self._tell(_LEFT, why, at)

    def comes(self) -> None:
        """This rank has come to a meeting after all: its error was mended."""
        self._take_back(_RAISED)

    def loops(self) -> None:
        """This rank is in a loop over the loader again."""
        self._take_back(_LEFT)

    def begin(self) -> None:
        """What this process told of an earlier run is past."""
        for kind in (_ENDED, _RAISED, _LEFT):
            self._take_back(kind)

    def reasons(self, at: At) -> list[Reason]:
        """Why others will not come there, the firmest reasons first."""
        found = [reason for rank in self._others() for reason in self._reasons_of(rank, at)]
        if self._gone:
            found.append(_NO_STORE)
        # An error because of another process names that one's reason at best.
        return sorted(
            found, key=lambda reason: (reason.text.startswith("ProcessLost"), reason == _NO_STORE, not reason.final)
        )

    def _others(self) -> list[int]:
        anything = self._try(lambda: self.store.check([_ANY]))
        return [rank for rank in range(self._size) if rank != self._rank] if anything else []

    def _reasons_of(self, rank: int, at: At) -> list[Reason]:
        for kind in (_ENDED, _RAISED, _LEFT):
            note = self._read(kind, rank)
            if note and (kind == _ENDED or tuple(note["at"]) == at):
                return [Reason(rank, note["why"], final=kind == _ENDED)]
        return []

    def _tell(self, kind: str, why: str, at: At | None = None) -> None:
        self._told[kind] = why
        self._write(kind, to_json({"why": why, "at": at}))

    def _take_back(self, kind: str) -> None:
        if self._told.pop(kind, None) is not None:
            self._write(kind, "null")

    def _write(self, kind: str, note: str) -> None:
        self._try(lambda: self.store.set(f"lsg/{kind}/{self._rank}", note))
        self._try(lambda: self.store.set(_ANY, "yes"))

    def _read(self, kind: str, rank: int) -> Any:
        key = f"lsg/{kind}/{rank}"
        return self._try(lambda: json_value(self.store.get(key)) if self.store.check([key]) else None)

    def _try(self, ask: Callable[[], Any]) -> Any:
        """None where the store is gone; it is not asked again, as each time torch prints a warning."""
        try:
            return None if self._gone else ask()
        except Exception:
            self._gone = True
            return None
