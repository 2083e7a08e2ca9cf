"""Hostile input to the command line: a part of the cases of benchmarks/fuzz.py, whose result is stored."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lsg.errors import ConfigurationError
from tests.support.fuzz import faults

RESULT = Path(__file__).parents[1] / "results" / "fuzz" / "fuzz.json"


def test_a_hundred_and_fifty_cases_are_answered_in_plain_words(tmp_path: Path) -> None:
    assert list(faults(tmp_path, seed=1, numbers=range(150))) == []


def test_the_stored_cases_are_ten_thousand_without_a_fault() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert found["cases"] >= 10_000 and found["faults"] == [] and found["provenance"]["commit"]
    assert not found["provenance"]["modified"]


@pytest.mark.parametrize("fault", ["traceback", "control", "lost"])
def test_the_fuzzer_finds_planted_faults(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*_: Any, **__: Any) -> None:
        if fault == "traceback":
            raise KeyError("scheduler")
        if fault == "control":
            sys.stdout.write("\x1b[2J")
        else:
            Path("kept/precious.txt").unlink(missing_ok=True)
        raise ConfigurationError("the end")

    monkeypatch.setattr("tests.support.fuzz.stand_in", planted)
    told = [found["fault"] for found in faults(tmp_path, seed=1, numbers=range(2, 62, 6))]
    assert any({"traceback": "KeyError", "control": "harmful", "lost": "changed"}[fault] in one for one in told)
