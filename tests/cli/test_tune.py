"""`lsg tune`: its options, the whole way to settings that `lsg train` takes, and one line for every mistake."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lsg.cli import app
from lsg.train.config import RunConfig, option
from tests.support.threads import one_thread  # noqa: F401 - a fixture for all tests here

FAST = ("--task", "digits", "--epochs", "1", "--accountant", "rdp", "--device", "cpu")


def lsg(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "150"})


def test_every_setting_of_a_run_and_of_the_search_has_an_option() -> None:
    shown = lsg("tune", "--help").stdout
    for field in dataclasses.fields(RunConfig):
        assert f"{option(field.name)} " in shown, field.name
    for own in ("--output", "--resume", "--public-data", "--held-out", "--try", "--runs", "--draw", "--shrink"):
        assert own in shown


def test_a_paid_search_tells_what_it_tried_and_what_it_cost(tmp_path: Path) -> None:
    output = tmp_path / "tuned"
    answer = lsg(
        "tune", *FAST, "--epsilon", "8", "--seed", "1", "--runs", "2", "--draw", "geometric", "--try", "lr=0.1,0.4",
        "--output", output,
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    privacy = json.loads((output / "privacy.json").read_text())
    assert 7.5 < privacy["epsilon"] <= 8 and "theorem 2" in privacy["search"]["bound"]
    for told in ("Tried (secret)", "PAID: the whole search is (8.00, 0.0001)", "lr 0.", privacy["statement"]):
        assert told in answer.stdout
    again = lsg("tune", "--resume", "--output", output)
    assert again.exit_code == 0 and privacy["statement"] in again.stdout


def test_settings_found_on_a_part_set_aside_go_into_lsg_train(tmp_path: Path) -> None:
    output = tmp_path / "tuned"
    answer = lsg(
        "tune", *FAST, "--epsilon", "8", "--held-out", "0.3", "--shrink", "2", "--runs", "2", "--try", "lr=0.1,0.4",
        "--output", output,
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    assert "NOT PRIVATE for about 30 % of the data" in answer.stdout
    final = lsg("train", "--config", output / "tuned.toml", "--output", tmp_path / "run")
    assert final.exit_code == 0, final.output
    privacy = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert any("EPSILON DOES NOT COVER THE SEARCH" in caveat for caveat in privacy["caveats"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--task", "digits"), "needs --epsilon or --noise-multiplier"),
        (("--task", "digits", "--noise-multiplier", "1"), "lsg tune needs --epsilon"),
        ((*FAST, "--epsilon", "3", "--try", "seed=1,2"), "'seed' cannot be varied"),
        ((*FAST, "--epsilon", "3", "--shrink", "4"), "a paid search releases the model"),
        ((*FAST, "--epsilon", "3", "--held-out", "0.2", "--public-data", "x"), "not both"),
        (("--resume", "--epsilon", "3"), "give --output alone"),
        (("--resume",), "holds no search to go on with"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    answer = lsg("tune", *arguments, "--output", tmp_path / "tuned")
    assert answer.exit_code == 2 and complaint in answer.output
    assert not (tmp_path / "tuned").exists()
