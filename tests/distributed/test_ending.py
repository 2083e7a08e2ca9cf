"""A process that ends, or that will not come any more, ends the others within seconds and with its reason."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import failing
from tests.support.processes import PROCESSES

SCRIPT = str(Path(__file__).with_name("failing.py"))
SIZE = failing.SIZE
SECONDS = 10.0  # from the fault to the end of the others' waiting: 2.5 of them to see whether it comes after all


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def start(way: str, rank: int, folder: Path, how: str) -> list[subprocess.Popen[bytes]]:
    arguments = [SCRIPT, way, str(rank), str(folder)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    own = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    if how == "torchrun":
        port = ["--master-addr", "127.0.0.1", "--master-port", own["MASTER_PORT"]]
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(SIZE), *port]
        return [subprocess.Popen([*run, *arguments], env=own, stderr=subprocess.PIPE)]
    if how == "spawn":
        return [subprocess.Popen([sys.executable, *arguments], env=own | {"SPAWN": "yes"}, stderr=subprocess.PIPE)]
    numbers = [{"RANK": str(here), "WORLD_SIZE": str(SIZE)} for here in range(SIZE)]
    return [subprocess.Popen([sys.executable, *arguments], env=own | its, stderr=subprocess.PIPE) for its in numbers]


def ended(way: str, rank: int, folder: Path, how: str) -> tuple[dict[int, dict[str, Any]], str]:
    """What each process said last, with the seconds since the fault; all that they printed as errors."""
    processes = start(way, rank, folder, how)
    try:
        for here, process in enumerate(processes):
            if here != rank or len(processes) == 1:
                process.wait(timeout=200)
        assert way != "stays" or processes[rank].poll() is None  # nothing keeps a process until that one ends
    finally:
        for process in processes:
            process.kill()
    printed = b"".join(process.communicate()[1] for process in processes).decode()
    return said_in(folder, rank, printed), printed


def ended_forked(way: str, rank: int, folder: Path) -> dict[int, dict[str, Any]]:
    """The same in processes that take no time to start, as children of multiprocessing, which have no excepthook."""
    port = free_port()
    processes = [
        PROCESSES.Process(target=failing.forked, args=(here, port, way, rank, str(folder))) for here in range(SIZE)
    ]
    for process in processes:
        process.start()
    try:
        for here, process in enumerate(processes):
            if here != rank:
                process.join(100)
                assert process.exitcode is not None, "a process did not end"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return said_in(folder, rank, "")


def said_in(folder: Path, rank: int, printed: str) -> dict[int, dict[str, Any]]:
    said = {int(file.stem): json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    assert rank in said, printed
    for found in said.values():
        found["after"] = found["time"] - said[rank]["time"]
    return said


def check(said: dict[int, dict[str, Any]], rank: int, reason: str) -> None:
    for other in set(range(SIZE)) - {rank}:
        found = said.get(other, {})
        assert found.get("error") == "ProcessLost" and found["after"] < SECONDS, found
        assert re.search(reason, found["words"]), found


LEFT = "rank {}: it left its loop over the loader before the end"
GONE = "another process was lost"
FORKED = {
    "lsg": LEFT,  # and what it raised, it printed
    "exits": LEFT,
    "os-exits": GONE,
    "killed": GONE,
    "step": "rank {}: PrivacyError: this optimizer's engine was detached",
    "stays": LEFT,  # its process lives on
}


@pytest.mark.parametrize(("way", "rank"), [*((way, 1) for way in FORKED), ("killed", 0), ("stays", 0)])
def test_the_others_end_within_seconds(way: str, rank: int, tmp_path: Path) -> None:
    """Rank 0 holds the store. What a rank was told of is named, and so is who told it."""
    check(ended_forked(way, rank, tmp_path), rank, FORKED[way].format(rank))


@pytest.mark.parametrize(
    ("way", "rank", "reason"),
    [
        ("raises", 1, "rank 1: ValueError: the data are gone"),
        ("raises", 0, f"rank 0: ValueError: the data are gone|{LEFT.format(0)}|{GONE}"),  # the store may go first
        ("interrupted", 1, "rank 1: KeyboardInterrupt"),
        ("stays", 1, LEFT.format(1)),
    ],
)
def test_plain_processes_end_with_the_error_that_ended_one(way: str, rank: int, reason: str, tmp_path: Path) -> None:
    check(ended(way, rank, tmp_path, "plain")[0], rank, reason)


@pytest.mark.parametrize("how", ["torchrun", "spawn"])
def test_launchers_end_with_the_error(how: str, tmp_path: Path) -> None:
    """The launcher ends what is left; the processes themselves do not hold it up."""
    _, printed = ended("raises", 1, tmp_path, how)
    assert "the data are gone" in printed, printed
