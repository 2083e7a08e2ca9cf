"""`lsg budget`: tables, plots, presets, one-line errors."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lsg.cli import app
from lsg.cli.budget import RECORDS, terminal_plot
from lsg.train.choose import choose_settings
from lsg.train.listener import Listener

FAST = ["--accountant", "rdp"]


@pytest.fixture
def only_rdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other accountants take seconds, and one test has them all."""
    module = import_module("lsg.cli.budget")  # as an attribute of lsg.cli, "budget" is the command
    monkeypatch.setattr(module, "ACCOUNTANTS", ("rdp",))
    monkeypatch.setattr(module, "PLOT_POINTS", 4)


def _run(*options: str) -> str:
    result = CliRunner().invoke(app, ["budget", *options, *FAST])
    assert result.exit_code == 0, result.output
    return result.output


def test_missing_noise_is_computed_and_shown_with_every_accountant() -> None:
    output = _run("--records", "2000", "--epsilon", "3", "--epochs", "4", "--batch-size", "100")
    assert "computed" in output and "noise multiplier" in output
    assert all(f"ε by {name}" in output for name in ("prv", "pld", "rdp"))
    assert "1e-05" in output  # δ from N
    assert "█" in output and "4 epochs" in output


@pytest.mark.usefixtures("only_rdp")
def test_a_task_fills_what_is_not_given() -> None:
    output = _run("--task", "digits", "--epsilon", "3")
    assert "computed" in output


@pytest.mark.usefixtures("only_rdp")
def test_a_task_has_the_recipe_and_the_plan_that_lsg_train_takes() -> None:
    notes: list[str] = []
    listener = Listener()
    listener.note = notes.append  # type: ignore[method-assign]
    trained = choose_settings({"task": "digits", "epsilon": 3.0}, "options", listener)
    output = _run("--task", "digits", "--epsilon", "3")
    assert output.startswith(notes[0]) and len(notes[0].splitlines()) == 5
    shown = {row.split("│")[1].strip(): row.split("│")[2].strip() for row in output.splitlines() if row.count("│") == 4}
    assert shown["expected batch size B"] == f"{trained.batch_size:,}" and shown["epochs"] == str(trained.epochs)
    assert shown["δ"] == f"{trained.delta:g}"


@pytest.mark.usefixtures("only_rdp")
def test_what_is_given_overrules_the_recipe_and_is_told() -> None:
    output = _run("--task", "digits", "--epsilon", "3", "--batch-size", "100")
    assert "given, and kept: batch_size" in output
    assert any("batch size" in row and " 100 " in row for row in output.splitlines())


@pytest.mark.usefixtures("only_rdp")
def test_the_papers_recipe_is_its_preset() -> None:
    output = _run("--task", "digits", "--epsilon", "3", "--recipe", "paper")
    assert "recipe" not in output and any("batch size" in row and " 512 " in row for row in output.splitlines())


@pytest.mark.usefixtures("only_rdp")
def test_your_own_texts_take_the_recipe_for_your_records() -> None:
    output = _run("--task", "text", "--records", "50000", "--epsilon", "3")
    assert "recipe for 50,000 records" in output and "2,200" in output and "1e-06" in output
    assert "the head alone" in _run("--task", "text", "--records", "2000", "--epsilon", "3")


@pytest.mark.usefixtures("only_rdp")
def test_a_language_model_takes_its_recipe() -> None:
    shown = _run("--task", "generate", "--records", "42000", "--epsilon", "8")
    assert "RGP(r=8)" in shown and "steps on about 1,025 records" in shown and "published, not measured" in shown


@pytest.mark.usefixtures("only_rdp")
def test_words_with_tags_take_the_rule_for_texts() -> None:
    shown = _run("--task", "tokens", "--records", "42000", "--epsilon", "8")
    assert "RGP(r=16)" in shown and "not measured for tags" in shown


@pytest.mark.usefixtures("only_rdp")
@pytest.mark.parametrize("task", RECORDS)
def test_every_public_task_has_a_plan(task: str) -> None:
    assert "recipe for" in _run("--task", task, "--epsilon", "3")


@pytest.mark.usefixtures("only_rdp")
def test_with_epsilon_and_noise_the_epochs_of_a_task_are_computed() -> None:
    rows = _run("--task", "digits", "--epsilon", "3", "--noise-multiplier", "4").splitlines()
    assert any("epochs" in row and "computed" in row for row in rows)
    rows = _run("--task", "digits", "--epsilon", "3", "--noise-multiplier", "4", "--epochs", "5").splitlines()
    assert any("batch size" in row and "computed" in row for row in rows)


@pytest.mark.usefixtures("only_rdp")
@pytest.mark.parametrize("name", ["plan.png", "plan.svg"])
def test_the_plot_is_written(tmp_path: Path, name: str) -> None:
    plan = ["--records", "2000", "--noise-multiplier", "2", "--epochs", "2", "--batch-size", "100"]
    _run(*plan, "--plot", str(tmp_path / "new" / name))
    assert (tmp_path / "new" / name).stat().st_size > 2000


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (["--epsilon", "3"], "--records is missing"),
        (["--task", "text", "--epsilon", "3"], "--records is missing"),
        (["--records", "100", "--epsilon", "3"], "given: --epsilon\n"),
        (["--task", "imagenet", "--epsilon", "3"], "imagenet"),
        (["--task", "sst2"], "leave out the one to compute"),
        (["--task", "sst2", "--epsilon", "3", "--recipe", "grandma"], "--recipe 'grandma' must be one of auto, paper"),
        (["--task", "text", "--records", "1", "--epsilon", "3"], "records=1"),
        (["--task", "text", "--records", "100", "--epsilon", "3", "--delta", "0.1"], "delta=0.1"),
        (["--records", "100", "--epsilon", "1", "--epochs", "1", "--batch-size", "10", "--delta", "0.1"], "--delta"),
        (["--task", "sst2", "--epsilon", "3", "--plot", "plan.jpg"], "plan.jpg"),
        (["--records", "0", "--epsilon", "1", "--epochs", "1", "--batch-size", "10"], "--records 0"),
    ],
)
def test_mistakes_give_one_line(options: list[str], culprit: str) -> None:
    result = CliRunner().invoke(app, ["budget", *options])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and culprit in result.stderr


def test_the_terminal_plot_grows_to_its_top() -> None:
    lines = terminal_plot([(1.0, 0.5), (2.0, 1.0)]).plain.splitlines()
    assert lines[0].startswith("1.00") and lines[0].rstrip().endswith("┤   ██")
    assert "██ ██" in lines[7]
    assert lines[-1].endswith("2 epochs")


@pytest.mark.usefixtures("only_rdp")
def test_a_full_disk_leaves_no_plot(tmp_path: Path) -> None:
    (tmp_path / "plan.png.partial").symlink_to("/dev/full")
    plan = ["--records", "2000", "--noise-multiplier", "2", "--epochs", "2", "--batch-size", "100"]
    result = CliRunner().invoke(app, ["budget", *plan, *FAST, "--plot", str(tmp_path / "plan.png")])
    assert result.exit_code == 1
    assert result.stderr == f"Error: cannot write {tmp_path / 'plan.png'} (No space left on device)\n"
    assert list(tmp_path.iterdir()) == []


def test_an_epsilon_too_small_to_tell_from_zero_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("lsg.cli.budget"), "PLOT_POINTS", 4)
    plan = ["--records", "2000", "--noise-multiplier", "1e9", "--epochs", "2", "--batch-size", "100"]
    result = CliRunner().invoke(app, ["budget", *plan, "--accountant", "pld"])
    assert result.exit_code == 0, result.output
    assert "1.00x" in result.output


def test_a_console_without_greek_letters_shows_the_plan() -> None:
    plan = ["--records", "2000", "--noise-multiplier", "2", "--epochs", "2", "--batch-size", "100"]
    command = [sys.executable, "-c", "from lsg.cli import run; run()", "budget", *plan, *FAST]
    answer = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "noise multiplier" in answer.stdout
