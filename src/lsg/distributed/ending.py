"""A process that ends tells the others why, so that they end with its reason and at once, not after a timeout.

The reason goes into the store that torch.distributed met at, which outlives a process. A process that is killed leaves
none; the others then learn from their broken connection to it that it is gone.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lsg.errors import ProcessLost, first_line

# torchrun's store outlives a restart of the workers: reasons of those before must not be read.
_KEY = f"lsg/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{{rank}}"
_PATIENCE = 2.0  # seconds that the others wait for a reason that is being written

_told = False


def tell_reasons(rank: int) -> None:
    """From now on an error that ends this process is told to the others."""
    global _told
    if _told:
        return
    _told = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ProcessLost):  # which only repeats what another one has told
            tell(rank, error)
        before(kind, error, trace)

    sys.excepthook = hook


def tell(rank: int, error: BaseException) -> None:
    store = _store()
    if store is None:
        return
    try:
        store.set(_KEY.format(rank=rank), f"{type(error).__name__}: {first_line(error)}")
    except Exception:  # the store went with the process that held it: there is nobody left to tell
        return


@contextmanager
def lost(rank: int, waited_for: str) -> Iterator[None]:
    """A collective is under way; where it fails, raise why."""
    try:
        yield
    except RuntimeError as error:
        reasons = _reasons(rank)
        if reasons:
            raise ProcessLost(f"training ends on rank {rank}, as another process ended: {'; '.join(reasons)}") from None
        raise ProcessLost(
            f"training ends on rank {rank}: another process was lost while this one waited for {waited_for} "
            f"({first_line(error)})"
        ) from error


def _reasons(rank: int) -> list[str]:
    """What other ranks have told, waited for a little: a connection breaks faster than a reason is read."""
    store = _store()
    deadline = time.monotonic() + _PATIENCE
    while store is not None:
        try:
            keys = {other: _KEY.format(rank=other) for other in range(dist.get_world_size()) if other != rank}
            found = [f"rank {r}: {store.get(key).decode()}" for r, key in keys.items() if store.check([key])]
        except Exception:  # the store is gone
            return []
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
    return []


def _store() -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()
