"""The words of `lsg demo`: they follow from the numbers, whichever way these fall."""

from types import SimpleNamespace
from typing import Any

import pytest

from lsg.demo.runs import DemoRun
from lsg.demo.settings import Settings
from lsg.demo.verdict import verdict
from lsg.demo.wide import Cost


def ran(contender: str, epsilon: float, score: float) -> DemoRun:
    config = next(c for c in Settings(epsilons=(epsilon,)).configs(contender))
    result: Any = SimpleNamespace(config=config, score=score)
    return DemoRun(contender, result)


def said(head: str, lines: list[str]) -> list[str]:
    """The lines under a head."""
    if head not in lines:
        return []
    rest = lines[lines.index(head) + 1 :]
    return [line for line in rest[: next((i for i, line in enumerate(rest) if line[0] != " "), len(rest))]]


@pytest.mark.parametrize(
    ("score", "head"), [(0.95, "Low rank wins:"), (0.81, "No clear difference:"), (0.60, "Low rank loses:")]
)
def test_accuracy_is_judged_by_its_error(score: float, head: str) -> None:
    lines = verdict([ran("lsg", 3.0, score), ran("dpsgd", 3.0, 0.80)], [])
    assert len(lines) == 2
    (text,) = said(head, lines)
    assert text.startswith(f"  accuracy at ε = 3: LSG {100 * (score - 0.8):+.1f} points")


def test_each_budget_is_judged_by_itself_and_without_dpsgd_nothing_is_said() -> None:
    runs = [ran("rgp", 1.0, 0.9), ran("rgp", 3.0, 0.7), ran("dpsgd", 1.0, 0.7), ran("dpsgd", 3.0, 0.9)]
    lines = verdict(runs, [])
    assert "ε = 1" in said("Low rank wins:", lines)[0] and "ε = 3" in said("Low rank loses:", lines)[0]
    assert verdict(runs[:2], []) == []


@pytest.mark.parametrize(
    ("milliseconds", "head", "ratio"),
    [(1.0, "Low rank wins:", "4.0"), (4.1, "No clear difference:", "1.0"), (8.0, "Low rank loses:", "0.5")],
)
def test_time_is_judged_beside_the_fastest_dpsgd(milliseconds: float, head: str, ratio: str) -> None:
    costs = [
        Cost("lsg", "LSG", 100, 400, milliseconds),
        Cost("dpsgd", "DPSGD", 9000, 36000, 9.0),
        Cost("opacus", "DPSGD, Opacus hooks", 9000, 36000, 4.0),
    ]
    lines = verdict([], costs)
    assert f"  time in the wide network: LSG is {ratio} times as fast as DPSGD, Opacus hooks" in said(head, lines)
    assert any("LSG noises 100 numbers" in line and "DPSGD 9,000" in line for line in said("Low rank wins:", lines))


def test_the_choice_of_lsg_train_stands_beside_the_best_other() -> None:
    lines = verdict([ran("recipe", 1.0, 0.9), ran("dpsgd", 1.0, 0.8), ran("sparse-dpsgd", 1.0, 0.95)], [])
    assert lines == [
        "lsg train's choice at ε = 1: DPSGD on scatter-linear, -5.0 points against the best other (SparseDPSGD(p=0.5))"
    ]
