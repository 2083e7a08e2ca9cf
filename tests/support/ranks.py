"""Runs a function on several ranks: processes of one gloo group on this machine. What each returns comes back."""

import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.processes import PROCESSES


class RankError(Exception):
    """rank: the first that failed. text: its traceback, empty where it was killed. everyones: by rank."""

    def __init__(self, everyones: dict[int, str]) -> None:
        self.everyones = everyones
        self.rank = next(iter(everyones))
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in everyones.items()))


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any, seconds: float = 120) -> list[Any]:
    """work(*arguments) on each rank; it is a module's own function, and asks torch.distributed for its rank.

    Raises RankError with what went wrong on every rank that failed, in the order in which they did.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_rank, args=(rank, size, folder, theirs, work, arguments), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    while len(results) + len(failed) < len(pipes):
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in results and rank not in failed]
        ready = wait(left, timeout=seconds)
        if not ready:
            raise TimeoutError(f"ranks did not end within {seconds} s; failed so far: {failed}")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                good, value = False, ""
            if good:
                results[rank] = value
            else:
                failed[rank] = value
    if failed:
        raise RankError(failed)
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, size: int, folder: str, pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        pipe.send_bytes(pickle.dumps((True, work(*arguments))))  # tensors by value, not as shared memory
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((False, "".join(traceback.format_exception(error)))))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
