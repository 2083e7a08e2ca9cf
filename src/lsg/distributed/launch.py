"""The processes that torchrun or `accelerate launch` started: their environment in, one process group out.

torchrun starts all of them again when one has died (--max-restarts). Its store outlives that: processes begin each
start in a place of their own there, and leave word in another one for those that are started later.

PyTorch is imported where it is needed: commands ask here what was launched before they load it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lsg.errors import ConfigurationError
from lsg.files.stop_signals import ending_whatever_is_waited_for

if TYPE_CHECKING:
    from lsg.distributed.group import Group

# The longest that ranks wait for one that is alive but busy (a download, say). Of one that died its broken connection
# tells at once.
PATIENCE = timedelta(minutes=30)

_LOOK = 0.1  # seconds between two looks whether all are there

_store: Any = None  # that the processes met at, without a prefix


def launched() -> bool:
    """Whether this is one of several processes that a launcher started."""
    known = os.environ
    return int(known.get("WORLD_SIZE") or 1) > 1 and "RANK" in known and "MASTER_ADDR" in known


def writes() -> bool:
    """Whether this process shows progress and writes files: rank 0, or one that nobody launched."""
    return not launched() or os.environ["RANK"] == "0"


def tells_errors() -> bool:
    """Whether this process says on the terminal why all of them end: the first to ask, as its error came first."""
    if not launched():
        return True
    try:
        return bool(_store.add(f"lsg/told/{_start()}", 1) == 1)
    except Exception:  # before the processes met, or without those who keep the store
        return writes()


@contextlib.contextmanager
def joined() -> Iterator[Group]:
    """Within, the processes that were launched are torch.distributed's default group; a process alone, or a script
    that began a group itself, has what it had. An error that ends one is told to the others."""
    import torch.distributed as dist

    from lsg.distributed.ending import tell
    from lsg.distributed.group import Group

    if not launched() or dist.is_initialized():
        yield Group.current()
        return
    global _store
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = _backend()
    try:
        with ending_whatever_is_waited_for():  # where another process has died, the launcher asks this one to end
            _store = _meeting_point(rank, size)
            own = dist.PrefixStore(f"lsg/start/{_start()}", _store)
            _wait_for_all(own, size)
            dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=PATIENCE)
            group = Group.current()
        yield group
    except BaseException as error:
        tell(error)
        raise
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def goes_on(group: Group, place: str, accept: Callable[[bool], None]) -> bool:
    """Whether an earlier start of this very job was at work in `place`. accept(goes_on): refuses the place, on rank 0.

    A job that begins in a place that holds something else is refused at each of its starts.
    """

    def on_first() -> bool:
        key = f"lsg/place/{place}"
        again = _start() > 0 and _store is not None and _store.check([key])
        accept(again)
        if _store is not None:
            _store.set(key, "begun")
        return bool(again)

    found: bool = group.on_first(on_first)
    return found


def _start() -> int:
    """How often torchrun has started the processes of this job before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _meeting_point(rank: int, size: int) -> Any:
    """torchrun's own store where it keeps one, rank 0's otherwise."""
    import torch.distributed as dist

    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, size, rank == 0 and not kept, PATIENCE, wait_for_workers=False, multi_tenant=True)


def _wait_for_all(store: Any, size: int) -> None:
    """Until as many processes are there, at most for so long as the group itself would wait: in Python, where Ctrl-C
    ends it."""
    store.add("here", 1)
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while store.add("here", 0) < size and time.monotonic() < deadline:
        time.sleep(_LOOK)


def _backend() -> str:
    """gloo for what is on the CPU, nccl for what is on a GPU, of which each process takes one."""
    import torch

    if not torch.cuda.is_available():
        return "gloo"
    place, gpus = int(os.environ.get("LOCAL_RANK") or 0), torch.cuda.device_count()
    if place >= gpus:
        raise ConfigurationError(
            f"{os.environ.get('LOCAL_WORLD_SIZE', place + 1)} processes were launched on this machine, which has "
            f"{gpus} GPUs: give torchrun --nproc-per-node {gpus}, or train on the CPU with CUDA_VISIBLE_DEVICES="
        )
    torch.cuda.set_device(place)
    return "cpu:gloo,cuda:nccl"
