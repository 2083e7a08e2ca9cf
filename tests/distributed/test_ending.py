"""A process that ends, or that will not come any more, ends the others within seconds and with its reason."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = str(Path(__file__).with_name("failing.py"))
SECONDS = 10.0  # from the fault to the end of the others' waiting: _GRACE and _LOOK are 2.5 of them


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def start(way: str, rank: int, folder: Path, how: str, size: int = 3) -> list[subprocess.Popen[bytes]]:
    arguments = [SCRIPT, way, str(rank), str(folder)]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }
    if how == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
        port = ["--master-addr", "127.0.0.1", "--master-port", environment["MASTER_PORT"]]
        return [subprocess.Popen([*run, *port, *arguments], env=environment, stderr=subprocess.PIPE)]
    if how == "spawn":
        own = environment | {"SPAWN": "yes"}
        return [subprocess.Popen([sys.executable, *arguments], env=own, stderr=subprocess.PIPE)]
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment | {"RANK": str(here), "WORLD_SIZE": str(size)},
            stderr=subprocess.PIPE,
        )
        for here in range(size)
    ]


def ends(way: str, rank: int, folder: Path, how: str) -> tuple[dict[int, dict[str, Any]], str]:
    """What each process said last, with the seconds since the fault; all that they printed as errors."""
    processes = start(way, rank, folder, how)
    waited_for = [p for here, p in enumerate(processes) if len(processes) == 1 or here != rank]
    try:
        for process in waited_for:
            process.wait(timeout=100)
        over = time.time()
    finally:
        for process in processes:
            process.kill()
    printed = b"".join(process.communicate()[1] for process in processes).decode()
    said = {int(file.stem): json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    assert rank in said, printed
    began = said[rank]["time"]
    assert over - began < SECONDS + 5, printed  # the processes end, too: nothing keeps them
    for found in said.values():
        found["after"] = found["time"] - began
    return said, printed


PLAIN = {
    "raises": "rank {}: ValueError: the data are gone",
    "lsg": "rank {}: PrivacyError: these records are mixed",
    "exits": "rank {}: it left its loop over the loader before the end",
    "os-exits": "another process was lost",
    "killed": "another process was lost",
    "interrupted": "rank {}: KeyboardInterrupt",
    "step": "rank {}: ConfigurationError: step.closure",
    "stays": "rank {}: it left its loop over the loader before the end",
}


@pytest.mark.parametrize(("way", "rank"), [*((way, 1) for way in PLAIN), ("raises", 0), ("killed", 0), ("stays", 0)])
def test_plain_processes_end_with_the_reason_of_the_one_that_failed(way: str, rank: int, tmp_path: Path) -> None:
    """Rank 0 holds the store."""
    said, printed = ends(way, rank, tmp_path, "plain")
    for other in {0, 1, 2} - {rank}:
        found = said.get(other, {})
        assert found.get("error") == "ProcessLost", (found, printed)
        assert found["after"] < SECONDS, found
        import re

        reason = PLAIN[way].format(rank)
        if rank == 0 and way == "raises":  # the store went with it: its reason was read, or is lost with it
            reason = f"{reason}|another process was lost"
        assert re.search(reason, found["words"]), found


@pytest.mark.parametrize("how", ["torchrun", "spawn"])
@pytest.mark.parametrize("way", ["raises", "killed"])
def test_launchers_end_within_seconds(way: str, how: str, tmp_path: Path) -> None:
    """The launcher ends what is left; the processes themselves do not hold it up."""
    _, printed = ends(way, 1, tmp_path, how)
    assert ("the data are gone" if way == "raises" else "SIGKILL") in printed, printed
