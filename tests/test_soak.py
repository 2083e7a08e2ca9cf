"""A short soak: the real one, of 10,000 steps, is `benchmarks/soak.py`, with its result in `results/soak/`."""

import json
from pathlib import Path

from tests.support.endurance import missed, soak

RESULT = Path(__file__).parents[1] / "results" / "soak" / "soak.json"


def test_three_hundred_steps_hold_on_to_nothing_and_spend_what_was_planned(tmp_path: Path) -> None:
    found = soak(300, tmp_path)
    assert not {"live_tensors", "live_objects"} & set(missed(found)), found["growth"]  # a test process's pages move
    assert found["steps_beyond_the_plan_until_the_target"] < 30


def test_the_stored_soak_meets_its_bar() -> None:
    stored = json.loads(RESULT.read_text())
    assert stored["steps"] >= 10_000 and not missed(stored)
    epsilon = stored["epsilon"]
    assert epsilon["ledger"] == epsilon["plan"] == epsilon["engine"] <= epsilon["target"]
    assert stored["provenance"]["commit"]
