"""The stored table of architectures, and the program that made it."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "results" / "architectures" / "table.json").read_text())["rows"]


def program() -> Any:
    spec = importlib.util.spec_from_file_location("architectures", ROOT / "benchmarks" / "architectures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stored_table_meets_its_bar() -> None:
    families = [row for row in ROWS if row["kind"] != "adapter"]
    assert len(families) >= 40 and sum(row["trains"] for row in families) >= 36
    assert not [row for row in ROWS if "failed" in row]
    for row in ROWS:
        assert row["error"] <= 1e-4 if row["trains"] else len(row["refused"]) > 30
    made = program()
    assert [row["name"] for row in ROWS] == [*made.FAMILIES, *made.ADAPTERS]


@pytest.mark.parametrize(("name", "trains"), [("bert", True), ("resnet", False)])
def test_a_model_is_judged_as_the_table_says(name: str, trains: bool) -> None:
    made = program()
    found = made.judge(lambda: made.family(name))
    assert found["trains"] is trains and ("BatchNorm2d" in found.get("refused", "")) is not trains


def test_a_wrong_gradient_would_be_seen() -> None:
    made = program()

    model, inputs = made.family("bert")
    made.no_dropout(model)
    before = made.batch_of_one_gradients

    def doubled(*args: Any) -> Any:
        return {key: 2 * gradient for key, gradient in before(*args).items()}

    made.batch_of_one_gradients = doubled
    assert made.largest_error(model, inputs) > 0.4
