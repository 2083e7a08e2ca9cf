"""Stops `lsg train` by SIGINT and SIGTERM at random moments, continues it each time, and compares its end."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lsg.checkpoint import _read

ROOT = Path(__file__).parents[2]
TINY = (
    *("--task", "digits", "--recipe", "paper", "--epochs", "3", "--batch-size", "700", "--accountant", "rdp"),
    *("--device", "cpu", "--seed", "3", "--noise-multiplier", "1", "--checkpoint-every", "1", "--resume"),
)
STOPS_OF_A_RUN = 4
SIGNALS = (signal.SIGINT, signal.SIGTERM)
HIDDEN = ("seconds", "samples_per_second")  # times, which differ from run to run


def begin(output: Path) -> "subprocess.Popen[str]":
    """`lsg train`, from wherever the folder stands."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.Popen(
        [sys.executable, "-m", "lsg", "train", *TINY, "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=output.parent,
        preexec_fn=_listen,  # a shell's background jobs ignore SIGINT, and so do their children
    )


def _listen() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stopped(output: Path, number: signal.Signals, moment: float) -> dict[str, Any]:
    """One attempt, stopped after so many seconds: how it ended, and what is wrong about that."""
    process = begin(output)
    try:
        process.wait(moment)
    except subprocess.TimeoutExpired:
        process.send_signal(number)
    sent = time.monotonic()
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return {"signal": number.name, "moment": moment, "faults": ["did not stop"], "exit": None}
    faults = [word for word in ("Traceback", "Exception ignored") if word in out + err]
    if process.returncode not in (0, 128 + number, -number):
        faults.append(f"exit code {process.returncode}: {(out + err)[-300:]}")
    return {
        "signal": number.name,
        "moment": round(moment, 4),
        "exit": process.returncode,
        "seconds_to_stop": round(time.monotonic() - sent, 2),
        "faults": faults + half_written(output),
        **({"stderr": err[-600:]} if faults else {}),
    }


def half_written(output: Path) -> list[str]:
    """Files that are not whole, in and beside the folder."""
    found = [f"{path.name} is left" for path in output.parent.rglob("*") if path.suffix in (".partial", ".tmp")]
    for path in output.rglob("*"):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".jsonl":
                [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            elif path.suffix == ".toml":
                tomllib.loads(path.read_text(encoding="utf-8"))
            elif path.name == "state.safetensors":
                _read(path)
        except (ValueError, OSError) as error:
            found.append(f"{path.name} is not whole: {error}")
    return found


def ending(output: Path) -> tuple[Any, ...]:
    """What a finished run has left, but for times and provenance."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    plain = [{key: value for key, value in row.items() if key not in HIDDEN} for row in rows]
    files = [(output / "model" / "model.safetensors").read_bytes(), (output / "privacy.json").read_bytes()]
    return plain, files, sorted(path.name for path in output.iterdir())


def stop_often(folder: Path, stops: int, seed: int = 0, workers: int = 1) -> dict[str, Any]:
    """At least so many stops, over as many runs as it takes; each run must end as the undisturbed one did.

    A run is stopped at four moments, if it does not end before, and then left alone.
    """
    whole = folder / "whole" / "run"
    whole.parent.mkdir()
    process = begin(whole)
    began = time.monotonic()
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    length, expected = time.monotonic() - began, ending(whole)

    def one_run(number: int) -> tuple[list[dict[str, Any]], str]:
        choose = random.Random(f"{seed}/{number}")
        output = folder / f"run-{number}" / "run"
        output.parent.mkdir()
        tried = [
            stopped(output, choose.choice(SIGNALS), choose.uniform(0.001, length))
            for _ in range(min(STOPS_OF_A_RUN, stops - STOPS_OF_A_RUN * number))
        ]
        out, err = begin(output).communicate()
        same = (output / "result.json").exists() and ending(output) == expected
        return tried, "" if same else (out + err)[-1000:] or "nothing was said"

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(one_run, range(-(-stops // STOPS_OF_A_RUN))))
    attempts = [attempt for tried, _ in found for attempt in tried]
    different = [told for _, told in found if told]
    return {
        "stops": len(attempts),
        "runs": len(found),
        "seconds_of_a_run": round(length, 1),
        "runs_that_ended_otherwise": len(different),
        "stops_with_faults": sum(bool(one["faults"]) for one in attempts),
        "stopped_before_the_end": sum(one["exit"] != 0 for one in attempts),
        "slowest_to_stop_seconds": max(one.get("seconds_to_stop", 60.0) for one in attempts),
        **({"told": different} if different else {}),
        "attempts": attempts,
    }
