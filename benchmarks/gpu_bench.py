"""Benches of `lsg bench` on a leased GPU, where time is short: they compile side by side and are timed one by one.

    python benchmarks/gpu_bench.py OUTPUT ROUNDS SECONDS PRESET:PRECISION:CONTENDERS...

Each bench has a process of its own. None times its contenders before all are ready (or SECONDS are over), and only one
does at a time. The time of first steps, which compile, is not to be trusted then. Nothing is timed either as long as
there is a file OUTPUT/hold: something else may use the GPU while they compile.
"""

import fcntl
import importlib
import inspect
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lsg.bench.timing
from lsg.bench.timing import Timing
from lsg.bench.timing import measure as measure_at_once


def main(output: Path, rounds: str, seconds: str, benches: list[str]) -> int:
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("*.ready"):
        old.unlink()
    deadline = str(time.time() + float(seconds))
    start = [sys.executable, __file__, "--one", str(output), rounds, deadline, str(len(benches))]
    running = [subprocess.Popen([*start, bench]) for bench in benches]
    return int(any([process.wait() for process in running]))


def one(output: Path, rounds: int, deadline: float, count: int, bench: str) -> None:
    name, precision, only = bench.split(":")

    def measure(builders: dict[str, Any], *, report: Callable[[str], None], **options: Any) -> list[Timing]:
        steps = iter(builders)
        turn = (output / "turn").open("w")

        def wait(line: str) -> None:
            report(f"{name} {precision}: {line}")
            if not line.startswith("round") and next(steps) == list(builders)[-1]:
                torch.cuda.empty_cache()  # the others are still building theirs
                (output / f"{name}-{precision}.ready").touch()
                while _must_wait(output, count) and time.time() < deadline:
                    time.sleep(0.1)
                fcntl.flock(turn, fcntl.LOCK_EX)

        with turn:  # closing it is the next one's turn
            return measure_at_once(builders, report=wait, **options)

    command: Any = importlib.import_module("lsg.cli.bench")
    lsg.bench.timing.measure = measure  # the command imports it when it runs
    inspect.unwrap(command.bench)(
        name=name, precision=precision, device="", rounds=rounds, only=only, sweep="", output=output
    )


def _must_wait(output: Path, count: int) -> bool:
    return len(list(output.glob("*.ready"))) < count or (output / "hold").exists()


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
