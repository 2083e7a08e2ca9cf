"""Hostile input to the command line: a part of the cases of benchmarks/fuzz.py, whose result is stored."""

import json
from pathlib import Path

from tests.support.fuzz import faults

RESULT = Path(__file__).parents[1] / "results" / "fuzz" / "fuzz.json"


def test_a_hundred_and_fifty_cases_are_answered_in_plain_words(tmp_path: Path) -> None:
    assert list(faults(tmp_path, seed=1, numbers=range(150))) == []


def test_the_stored_cases_are_ten_thousand_without_a_fault() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert found["cases"] >= 10_000 and found["faults"] == [] and found["provenance"]["commit"]
    assert not found["provenance"]["modified"]
