"""A script for several processes: trains, and fails on one of them in the way that its argument says.

    failing.py WAY RANK FOLDER

Each process writes what it ended with, and when, into FOLDER. Its process group is torchrun's, or a plain one's.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from lsg.errors import LsgError, PrivacyError
from tests.distributed.runs import Setting, begin

SIZE = 3
AT = 3  # the number of the batch at which it fails


def say(folder: Path, **what: object) -> None:
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(what | {"time": time.time()}))


def fail(way: str, run: object, loss: object, folder: Path) -> None:
    """What happens between a forward and its backward."""
    say(folder, began="to fail")
    if way == "raises" or way == "stays":
        raise ValueError("the data are gone")
    if way == "lsg":
        raise PrivacyError("these records are mixed")
    if way == "exits":
        sys.exit(3)
    if way == "os-exits":
        os._exit(4)
    if way == "killed":
        threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    if way == "interrupted":
        raise KeyboardInterrupt
    if way == "step":
        run.optimizer.close()  # type: ignore[attr-defined]
        run.optimizer.step()  # type: ignore[attr-defined]
    time.sleep(60)


def work(way: str, rank: int, folder: str) -> None:
    here, place = dist.get_rank(), Path(folder)
    run = begin(Setting(records=40, batch_size=8, physical=4))
    for _ in range(3):
        for number, (tokens, labels) in enumerate(run.loader):
            loss = F.cross_entropy(run.model(tokens), labels)
            if here == rank and number == AT:
                fail(way, run, loss, place)
            loss.backward()
            run.optimizer.step()


def main(way: str, rank: int, folder: str) -> None:
    try:
        work(way, rank, folder)
    except LsgError as error:
        if dist.get_rank() == rank:
            raise
        say(Path(folder), error=type(error).__name__, words=str(error))
    except ValueError:
        if way != "stays":
            raise
        time.sleep(300)  # caught, and the process lives on: in a notebook, say


def spawned(here: int, way: str, rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(here), "WORLD_SIZE": str(SIZE)}
    dist.init_process_group("gloo")
    main(way, rank, folder)


def forked(here: int, port: str, way: str, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    spawned(here, way, rank, folder)


if __name__ == "__main__":
    way, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if os.environ.get("SPAWN"):
        mp.spawn(spawned, args=(way, rank, folder), nprocs=SIZE, join=True)
    else:
        dist.init_process_group("gloo")
        main(way, rank, folder)
