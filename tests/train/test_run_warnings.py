"""Warnings of a run: said when they are true, and not before they are clear; none about the data is released."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lsg.train.listener import Listener
from lsg.train.run import RunResult, run
from lsg.train.run_warnings import OneAnswer, RunFacts, find_warnings
from tests.support.train_runs import DIGITS, rows, strict

FACTS = RunFacts(steps=100, epochs=4, max_grad_norm=1.0, one_answer={"test": OneAnswer(0.5, 1000)})


def row(epoch: int = 4, **values: Any) -> dict[str, Any]:
    """Of a run with nothing wrong: the signal of 100 steps is twice as long as their noise."""
    fine = {"loss": 0.3, "samples_per_second": 100.0, "clip_share": 0.5, "signal_norm": 0.2, "noise_norm": 1.0}
    made = {"epoch": epoch, "score": 0.8, **fine} | values
    return {**made, "scores": values.get("scores", {"test": made["score"]})}


def names(*found: dict[str, Any], facts: RunFacts = FACTS) -> list[str]:
    return [warning.name for warning in find_warnings(found, facts)]


def test_a_run_that_learns_has_none() -> None:
    assert names() == [] and names(row(1), row(2), row(3), row(4)) == []


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"score": 0.49}, "one answer"),
        ({"score": 0.53}, "one answer"),  # half and two standard errors are 0.5316
        ({"clip_share": 0.0}, "nothing clipped"),
        ({"clip_share": 0.009}, "nothing clipped"),
        ({"clip_share": 0.995}, "everything clipped"),
        ({"signal_norm": 0.04}, "noise"),
        ({"signal_norm": 0.0}, "noise"),
        ({"loss": None}, "loss"),
    ],
)
def test_each_is_said_with_what_to_do(wrong: dict[str, Any], name: str) -> None:
    assert names(row(**wrong)) == [name]
    (warning,) = find_warnings([row(**wrong)], FACTS)
    assert " --" in warning.text and warning.releasable == (name == "one answer")
    assert warning.releasable or "not private" in warning.text


@pytest.mark.parametrize(
    "fine",
    [
        {"score": 0.54},
        {"clip_share": 0.02},
        {"clip_share": 0.98},
        {"clip_share": None},  # automatic
        {"signal_norm": 0.06},
        {"noise_norm": 0.0},
        {"loss": None, "samples_per_second": 0.0},  # an epoch that drew nothing
        {"clip_share": None, "signal_norm": None, "noise_norm": None},  # without privacy
    ],
)
def test_none_is_said_without_a_reason(fine: dict[str, Any]) -> None:
    assert names(row(**fine)) == []


def test_rows_of_older_versions_have_no_signals() -> None:
    old = {key: value for key, value in row(1).items() if key not in ("clip_share", "signal_norm", "noise_norm")}
    assert names(old, row()) == [] and names(old, row(clip_share=0.0)) == ["nothing clipped"]


def test_what_may_change_is_not_said_in_the_first_half() -> None:
    early = {"score": 0.5, "clip_share": 1.0}
    assert names(row(1, **early)) == []
    assert names(row(1, **early), row(2, **early)) == ["one answer", "everything clipped"]
    assert names(row(3, **early), row(4)) == []  # it went away
    assert names(row(1, clip_share=0.0, signal_norm=0.01)) == ["noise", "nothing clipped"]  # clear at once


def test_one_part_above_one_answer_is_enough() -> None:
    facts = replace(FACTS, one_answer={"a": OneAnswer(0.5, 1000), "b": OneAnswer(0.3, 1000)})
    assert names(row(score=0.4, scores={"a": 0.5, "b": 0.3}), facts=facts) == ["one answer"]
    assert names(row(score=0.45, scores={"a": 0.5, "b": 0.4}), facts=facts) == []


def test_a_score_on_records_of_the_same_file_is_not_released() -> None:
    (apart,), (inside,) = (
        find_warnings([row(score=0.5)], replace(FACTS, scored_apart=apart)) for apart in (True, False)
    )
    assert apart.releasable and not inside.releasable and apart.text == inside.text


# --- real runs --------------------------------------------------------------------------------------------------------


class Warned(Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, text: str) -> None:
        self.lines.append(text)


def test_rows_hold_the_signals(finished: tuple[Path, RunResult]) -> None:
    for found in rows(finished[0]):
        assert 0 < found["clip_share"] <= 1 and found["signal_norm"] > 0 < found["noise_norm"]
        assert found["update_norm"] == pytest.approx((found["signal_norm"] ** 2 + found["noise_norm"] ** 2) ** 0.5, 0.1)


def test_a_threshold_that_no_gradient_reaches_is_told_once_and_stays_out_of_the_statement(tmp_path: Path) -> None:
    warned = Warned()
    result = run(replace(DIGITS, max_grad_norm=1e4), tmp_path / "run", listener=warned)
    told = [line for line in warned.lines if "nothing is clipped" in line]
    assert len(told) == 1 and "--max-grad-norm 10000" in told[0]
    kinds = ("not clearly better", "noise drowns", "nothing is clipped")
    assert [kind for warning in result.warnings for kind in kinds if kind in warning] == list(kinds)
    privacy = strict(tmp_path / "run" / "privacy.json")
    assert privacy["warnings"] == result.warnings[:1] and next(iter(privacy)) == "warnings"
    assert not {"clip_share", "signal_norm", "noise_norm", "update_norm"} & privacy.keys()


def test_what_is_held_out_of_private_data_stays_out_of_the_statement(tmp_path: Path) -> None:
    """The statement may be released, and ε covers no exact score of private records."""
    result = run(replace(DIGITS, max_grad_norm=1e4, validation=0.3), tmp_path / "run")
    assert "not clearly better" in result.warnings[0]
    assert strict(tmp_path / "run" / "privacy.json")["warnings"] == []


def test_a_run_that_learns_is_not_warned_of(tmp_path: Path) -> None:
    warned = Warned()
    config = replace(DIGITS, method="dpsgd", lr=0.5, epochs=10)
    result = run(config, tmp_path / "run", listener=warned)
    assert result.score > 0.6
    assert result.warnings == strict(tmp_path / "run" / "privacy.json")["warnings"] == []
    assert not [line for line in warned.lines if "everything is clipped" not in line]


def test_results_of_older_versions_have_no_warnings(finished: tuple[Path, RunResult]) -> None:
    stored = strict(finished[0] / "result.json")
    del stored["warnings"]
    assert RunResult.from_dict(stored, "").warnings == []
