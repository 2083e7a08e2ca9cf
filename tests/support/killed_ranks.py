"""Kills one of several workers of `torchrun -m lsg train` with SIGKILL at random moments; each run must end as one that
nobody disturbed, and no worker may outlive the killed one for long."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lsg.accounting.ledger import Ledger
from tests.support.train_runs import same, strict

RANKS, LONGEST = 3, 30.0  # seconds that a worker may take to end after another one was killed
# Views draw from the dropout stream of each rank, so that it matters whether that is continued.
RUN = (
    *("--task", "digits", "--model", "small-cnn", "--recipe", "paper", "--noise-multiplier", "1", "--seed", "3"),
    *("--accountant", "rdp", "--epochs", "4", "--batch-size", "200", "--views", "2", "--device", "cpu"),
    *("--checkpoint-every", "3"),
)


def launched(
    folder: Path, *, ranks: int = RANKS, restarts: int = 0, options: Sequence[str] = RUN, log: Path | None = None
) -> "subprocess.Popen[str]":
    """`torchrun -m lsg train` into the folder. Its workers are its children."""
    launcher = (
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--max-restarts", str(restarts), "--master-port", str(_free_port())),
    )
    with (log or folder.with_name(folder.name + ".log")).open("a") as file:
        return subprocess.Popen(
            [*launcher, "-m", "lsg", "train", *options, "--output", str(folder)],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def kill_ranks(
    folder: Path, kills: int, *, seed: int = 0, elastic: bool, tell: Callable[[str], Any] = print
) -> dict[str, Any]:
    """Kill so often, over as many runs as it takes. elastic: torchrun starts the workers again by itself; else the
    command is given again, with --resume."""
    choose, started = random.Random(seed), time.monotonic()
    whole = folder / "whole"
    if not whole.exists():
        assert launched(whole).wait(300) == 0, whole.with_name("whole.log").read_text()
    done, runs, waits = 0, 0, [0.0]
    while done < kills:
        run = folder / f"{'elastic' if elastic else 'resumed'}-{runs}"
        most = min(kills - done, 4)
        found = (_elastic if elastic else _resumed)(run, most, choose)
        _ended_as(run, whole)
        done, runs, waits = done + len(found), runs + 1, waits + found
        tell(
            f"{run.name}: killed {len(found)} times ({done} of {kills}), the others ended within {max(waits):.1f} s, "
            f"same result, {time.monotonic() - started:.0f} s"
        )
    return {"kills": done, "runs": runs, "longest_wait_seconds": round(max(waits), 2)}


def _elastic(run: Path, most: int, choose: random.Random) -> list[float]:
    waits: list[float] = []
    launcher = launched(run, restarts=most)
    try:
        while len(waits) < most and (wait := _kill_one(launcher, run, choose)) is not None:
            waits.append(wait)
        assert launcher.wait(300) == 0, run.with_name(run.name + ".log").read_text()
    finally:
        _end(launcher)
    return waits


def _resumed(run: Path, most: int, choose: random.Random) -> list[float]:
    waits: list[float] = []
    while True:
        launcher = launched(run, options=(*RUN, "--resume"))
        try:
            wait = _kill_one(launcher, run, choose) if len(waits) < most else None
            code = launcher.wait(300 if wait is None else LONGEST)
        finally:
            _end(launcher)
        if wait is None:
            assert code == 0, run.with_name(run.name + ".log").read_text()
            return waits
        assert code != 0
        waits.append(wait)


def _kill_one(launcher: "subprocess.Popen[str]", run: Path, choose: random.Random) -> float | None:
    """Seconds that the other workers lived on; None where the run ended before its moment came.

    One moment in five is while the processes begin; the others are in training, some of it while steps are repeated.
    """
    victim, beginning, moment = choose.randrange(RANKS), choose.random() < 0.2, choose.random()
    begun = time.time()
    while len(workers := _workers(launcher.pid)) < RANKS:
        if launcher.poll() is not None:
            return None
        time.sleep(0.02)
    if not beginning:
        checkpoint = run / "checkpoint" / "state.safetensors"
        while not _newer(
            checkpoint, begun
        ):  # written before the first step, and again before the first after a restart
            if launcher.poll() is not None or (run / "result.json").exists():
                return None
            time.sleep(0.01)
    time.sleep(moment * (8 if beginning else 4))
    if launcher.poll() is not None or (run / "result.json").exists() or _workers(launcher.pid) != workers:
        return None
    os.kill(workers[victim], signal.SIGKILL)
    killed = time.monotonic()
    while any(_alive(pid) for pid in workers.values()):
        assert time.monotonic() - killed < LONGEST, f"{run}: a worker lives on after rank {victim} was killed"
        time.sleep(0.01)
    return time.monotonic() - killed


def _ended_as(run: Path, whole: Path) -> None:
    same(run, whole)
    wanted = strict(whole / "result.json")
    found = strict(run / "result.json")
    assert found["epsilon"] == wanted["epsilon"] and found["processes"] == RANKS
    assert Ledger(run / "ledger").history() == Ledger(whole / "ledger").history(), f"{run}: another ledger"
    assert not (run / "checkpoint").exists() and not (run / "lock").exists()


def _workers(launcher: int) -> dict[int, int]:
    """Rank -> process, of those that live."""
    found = {}
    for pid in _children(launcher):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")), None)
        if rank is not None and b"lsg" in command and b"train" in command and _alive(pid):
            found[rank] = pid
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _newer(file: Path, moment: float) -> bool:
    try:
        return file.stat().st_mtime > moment
    except OSError:
        return False


def _end(launcher: "subprocess.Popen[str]") -> None:
    if launcher.poll() is None:
        workers = _workers(launcher.pid)
        launcher.kill()
        for pid in workers.values():
            if _alive(pid):
                os.kill(pid, signal.SIGKILL)
    launcher.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
