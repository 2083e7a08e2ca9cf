"""Whoever waits is told what for: within a second on a terminal, after three everywhere, and less and less often."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lsg.files import sign_of_life
from lsg.files.sign_of_life import FIRST, LONGEST, WAIT, Waits, doing, spoken

ROOT = Path(__file__).parents[2]


def told(waits: Waits, seconds: float, loading: Callable[[], str] = lambda: "") -> Iterator[tuple[float, str]]:
    """(second, line) of a clock that goes by tenths."""
    for tenth in range(int(seconds * 10) + 1):
        if line := waits.due(tenth / 10, loading):
            yield tenth / 10, line


def test_the_first_line_on_a_terminal_comes_within_a_second_and_the_next_after_three() -> None:
    assert FIRST < 1 and WAIT == 3
    moments = [moment for moment, _ in told(Waits(0.0, FIRST), 4)]
    assert moments == pytest.approx([FIRST, FIRST + WAIT])


def test_the_same_is_told_less_and_less_often() -> None:
    moments = [moment for moment, _ in told(Waits(0.0, WAIT), 400)]
    pauses = [after - before for before, after in zip([0.0, *moments], moments, strict=False)]
    assert pauses[:6] == pytest.approx([3, 3, 6, 12, 24, 48])
    assert pauses[6:] == pytest.approx([LONGEST] * len(pauses[6:]))


def test_something_else_is_told_after_three_seconds_in_its_own_words() -> None:
    waits = Waits(0.0, WAIT)
    assert list(told(waits, 4, lambda: "loading torch")) == [(3.0, "loading torch (3 s)")]
    waits.begins("finding the noise", 4.0)
    assert waits.due(5.9) == "" and waits.due(6.0) == "finding the noise"
    waits.ends()
    assert waits.due(9.0) == "at work (9 s)"


def test_a_text_begins_the_wait_anew_also_before_the_first_line() -> None:
    waits = Waits(0.0, FIRST)
    waits.spoken(0.5)
    assert waits.due(3.4) == "" and waits.due(3.5)


def test_the_words_of_a_function_are_asked_for_when_a_line_is_due() -> None:
    waits, step = Waits(0.0, WAIT), 0
    waits.begins(lambda: f"step {step}", 0.0)
    step = 7
    assert waits.due(3.0) == "step 7 (3 s)"


def test_the_library_is_silent() -> None:
    assert sign_of_life._waits is None  # only the command itself begins to tell
    with doing("nothing"):
        spoken()


PROGRAM = """
import sys, time
from lsg.files import sign_of_life
from lsg.files.foreign_text import say
sign_of_life.WAIT = 0.3
sign_of_life.tell_waits(say)
with sign_of_life.doing("finding\\x1b the noise"):
    time.sleep(0.8)
print("done", file=sys.stderr)
"""


def test_a_wait_is_told_on_stderr_and_ends_with_the_process() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert all(line.startswith("lsg: finding\\x1b the noise") for line in lines[:-1]) and lines[-1] == "done"
    assert len(lines) > 1


PRINTERS = """
from unittest.mock import patch
with patch("lsg.files.sign_of_life._waits") as waits:
    from lsg.files.foreign_text import say
    from lsg.files.terminal import Terminal, echo
    for number, show in enumerate((say, echo, Terminal().print, Terminal().lines), 1):
        show("text")
        assert waits.spoken.call_count == number, show
"""


def test_every_printer_ends_a_wait() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", PRINTERS], check=True, capture_output=True, env=environment)


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_command_on_a_terminal_says_that_it_loads_before_anything_else(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "lsg", "explain", "--model", "small-cnn"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=tmp_path)
    os.close(theirs)
    shown = b""
    while b"\n" not in shown:
        shown += os.read(ours, 1000)
    process.kill()
    process.wait()
    os.close(ours)
    assert shown.startswith(b"lsg: ")
