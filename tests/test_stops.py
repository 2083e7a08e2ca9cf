"""SIGINT and SIGTERM: a few moments of a run; benchmarks/kill_signals.py has a hundred."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stops import ROOT, begin, half_written, stop_often

RESULT = ROOT / "results" / "kills" / "signals.json"


def test_three_stops_and_a_continuation_end_as_the_undisturbed_run(tmp_path: Path) -> None:
    found = stop_often(tmp_path, 3, seed=5)
    assert found["stops"] == 3 and not found["runs_that_ended_otherwise"]
    assert [one["faults"] for one in found["attempts"]] == [[], [], []]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_during_the_imports_is_silent(tmp_path: Path, number: signal.Signals) -> None:
    process = begin(tmp_path / "run")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (128 + number, -number) and "Traceback" not in out + err
    assert not half_written(tmp_path / "run")


WORK = """
import os, signal, sys, time
from lsg.files.stop_signals import Stopped, asked_to_stop, end_at_once, stopping_by_exception
end_at_once()
class Dies:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
try:
    with stopping_by_exception():
        {within}
        time.sleep(10 if asked_to_stop() else 0)
except Stopped as stop:
    sys.stdout.write(f"stopped {{stop.number}} {{asked_to_stop()}}")
    sys.stdout.flush()
{after}
"""


@pytest.mark.parametrize(
    ("within", "after", "told", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(1)", "", "stopped 2 2", 0),
        ("x = Dies(); del x; time.sleep(10)", "", "stopped 15 15", 0),  # Python would print it and go on
        ("pass", "os.kill(os.getpid(), signal.SIGTERM); time.sleep(10)", "", 143),
    ],
)
def test_a_signal_is_an_exception_while_a_command_works_and_the_end_otherwise(
    within: str, after: str, told: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORK.format(within=within, after=after)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    assert (done.stdout, done.stderr, done.returncode) == (told, "", code)


@pytest.mark.skipif(not RESULT.exists(), reason="benchmarks/kill_signals.py has not stored its result yet")
def test_the_stored_stops_meet_their_bar() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert found["stops"] >= 100 and not found["provenance"]["modified"]
    assert not found["runs_that_ended_otherwise"] and not found["stops_with_faults"]
