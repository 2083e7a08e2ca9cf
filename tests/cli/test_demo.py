"""`lsg demo`: what it writes and prints, that a seed repeats it, and how it answers bad options."""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from typer.testing import CliRunner

from lsg import __version__
from lsg.cli import app
from lsg.report.figures import save_demo_figure
from lsg.tasks.digits import TEST_IMAGES, TRAIN_IMAGES, digits
from lsg.train.choose import choose_settings
from lsg.train.listener import Listener
from lsg.train.provenance import provenance
from tests.support.threads import one_thread  # noqa: F401 - a fixture for all tests here

SHORT = ("--epsilon", "3", "--width", "0")


def lsg(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def results(folder: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((folder / "results.json").read_text(), parse_constant=refuse)


def runs(folder: Path) -> dict[tuple[str, float | None], dict[str, Any]]:
    """By method and ε."""
    return {(run["method"], run["target_epsilon"]): run for run in results(folder)["runs"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One short run of all that is shown, shared by the tests that only look at it."""
    folder = tmp_path_factory.mktemp("demo") / "deep" / "folder"
    options = ("--epochs", "2", "--seed", "3", "--epsilon", "3,1", "--methods", "lsg,dpsgd,recipe,non-private")
    answer = lsg("demo", *options, "--width", "64", "--output", str(folder))
    assert answer.exit_code == 0, answer.output
    (folder / "stdout").write_text(answer.stdout)
    return folder


def test_results_hold_settings_provenance_and_one_record_an_epoch(folder: Path) -> None:
    found = results(folder)
    assert found["seed"] == 3 and found["settings"]["epochs"] == 2 and found["settings"]["epsilons"] == [3.0, 1.0]
    assert found["versions"]["lsg"] == __version__ and found["versions"]["torch"] == torch.__version__
    assert {"command", "commit", "hardware", "time_utc"} <= found.keys()
    assert found["hardware"]["torch_threads"] == 1  # as it was during training
    private, plain = runs(folder)["LSG(r=8, p=0.5)", 3.0], runs(folder)["NonPrivate", None]
    assert len(private["epochs"]) == len(plain["epochs"]) == 2
    assert 0 < private["epochs"][0]["epsilon"] < private["epsilon"] <= 3.0
    assert private["epsilon"] > 2.9
    assert private["noise_multiplier"] > 0 and plain["noise_multiplier"] == 0
    assert private["noise_dimensions"] > 0 and plain["noise_dimensions"] == 0
    assert plain["epsilon"] is None  # infinite
    for method in (private, plain):
        assert method["test_accuracy"] == method["epochs"][-1]["score"]
        assert 0 <= method["test_accuracy"] <= 1
        assert method["test_accuracy"] * TEST_IMAGES == pytest.approx(round(method["test_accuracy"] * TEST_IMAGES))


def test_the_recipe_is_what_lsg_train_chooses(folder: Path) -> None:
    found = runs(folder)["lsg train's choice", 1.0]
    config = choose_settings({"task": "digits", "epsilon": 1.0}, "options", Listener())
    assert (found["model"], found["lr"], len(found["epochs"])) == (config.model, config.lr, config.epochs)
    assert found["epsilon"] <= 1 and found["test_accuracy"] > 0.8


def test_the_table_shows_what_the_results_say(folder: Path) -> None:
    printed = (folder / "stdout").read_text()
    for (label, _), run in runs(folder).items():
        row = next(line for line in printed.splitlines() if line.startswith("│") and label in line)
        assert f"{100 * run['test_accuracy']:.1f} ±" in row
        assert (f"{run['noise_dimensions']:,}" if run["noise_dimensions"] else "none") in row
    assert "not private" in printed and "ε = 3" in printed and "ε = 1" in printed


def test_the_wide_network_is_timed_beside_opacus_and_the_verdict_printed(folder: Path) -> None:
    found, printed = results(folder), (folder / "stdout").read_text()
    costs = {cost["contender"]: cost for cost in found["wide"]}
    assert costs.keys() == {"lsg", "dpsgd", "non-private", "opacus"}
    assert all(cost["milliseconds"] > 0 for cost in costs.values())
    assert costs["dpsgd"]["noised"] == costs["opacus"]["noised"] > 5 * costs["lsg"]["noised"] > 0
    assert costs["non-private"]["noised"] == 0
    assert "\n".join(found["verdict"]) in printed and "size in the wide network" in printed


def test_the_figure_is_a_picture(folder: Path) -> None:
    height, width = matplotlib.image.imread(folder / "figure.png").shape[:2]
    assert width > height > 500


def trained(folder: Path, *options: str) -> dict[str, Any]:
    """Label of each method -> what a demo at ε = 3 with these options says of it."""
    answer = lsg("demo", *options, *SHORT, "--output", str(folder))
    assert answer.exit_code == 0, answer.output
    return {label: run for (label, _), run in runs(folder).items()}


def test_a_seed_repeats_the_run_and_another_does_not(tmp_path: Path) -> None:
    def run(name: str, seed: str) -> list[tuple[float, float | None]]:
        options = ("--methods", "lsg", "--epochs", "2", "--batch-size", "128", "--seed", seed)
        found = trained(tmp_path / name, *options)["LSG(r=8, p=0.5)"]
        return [(epoch["loss"], epoch["score"]) for epoch in found["epochs"]]

    first = run("first", "0")
    assert run("again", "0") == first
    assert run("other", "1") != first


def test_dpsgd_noises_more_numbers_than_lsg_with_the_same_noise_multiplier(tmp_path: Path) -> None:
    found = trained(tmp_path, "--methods", "dpsgd,lsg", "--epochs", "1")
    dense, low_rank = found["DPSGD"], found["LSG(r=8, p=0.5)"]
    assert dense["noise_dimensions"] > 7 * low_rank["noise_dimensions"]
    assert dense["noise_multiplier"] == low_rank["noise_multiplier"]


def test_a_few_epochs_without_privacy_learn_the_digits(tmp_path: Path) -> None:
    found = trained(tmp_path, "--methods", "non-private", "--epochs", "5", "--batch-size", "128")
    assert found["NonPrivate"]["test_accuracy"] > 0.8


def test_the_split_is_stratified_and_fixed() -> None:
    data = digits()
    assert data.train_images.shape == (TRAIN_IMAGES, 1, 8, 8) and data.test_images.shape == (TEST_IMAGES, 1, 8, 8)
    assert data.train_images.min() >= 0 and data.train_images.max() == 1
    counts = data.test_labels.bincount()
    assert counts.min() >= 34 and counts.max() <= 38  # 360 images, ten classes of nearly equal size
    digits.cache_clear()
    assert torch.equal(digits().test_images, data.test_images)


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--epsilon", "0", "epsilon=0 must be positive"),
        ("--epsilon", "-1", "epsilon=-1 must be positive"),
        ("--epsilon", "nan", "epsilon=nan must be positive"),
        ("--epsilon", "inf", "epsilon=inf must be positive and finite"),
        ("--epsilon", "1,0", "epsilon=0 must be positive"),
        ("--epsilon", "much", "epsilon=much must be numbers with commas"),
        ("--epsilon", ",", "epsilon: none given"),
        ("--width", "12", "width=12: must be a multiple of 8"),
        ("--width", "-8", "width=-8: must be a multiple of 8"),
        ("--delta", "0", "delta=0 must be above 0"),
        ("--delta", "0.001", "delta=0.001 must be above 0 and below 1/N"),
        ("--epochs", "0", "epochs=0 must be at least 1"),
        ("--batch-size", "0", "batch_size=0 must lie between 1 and 1437"),
        ("--batch-size", "5000", "batch_size=5000 must lie"),
        ("--max-grad-norm", "0", "max_grad_norm=0 must be positive"),
        ("--lr", "-0.1", "lr=-0.1 must be positive"),
        ("--seed", "-1", "seed=-1 must lie between"),
        (
            "--methods",
            "lsg,sgd",
            "methods: 'sgd' is not known; choose from recipe, lsg, rgp, sparse-dpsgd, dpsgd, non-private",
        ),
        ("--methods", " , ", "methods: none given"),
    ],
)
def test_a_bad_value_gives_one_line_and_no_traceback(tmp_path: Path, option: str, value: str, complaint: str) -> None:
    answer = lsg("demo", "--output", str(tmp_path / "out"), option, value)
    assert answer.exit_code == 2
    assert answer.stderr.startswith("Error: ") and answer.stderr.count("\n") == 1
    assert complaint in answer.stderr
    assert answer.stdout == "" and not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    answer = lsg("demo", "--output", str(tmp_path / "file"))
    assert answer.exit_code == 2 and answer.stdout == ""
    assert answer.stderr.count("\n") == 1 and "cannot make this folder" in answer.stderr
    assert (tmp_path / "file").read_text() == "precious"


def test_results_that_cannot_be_written_give_one_line(tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    answer = lsg("demo", "--epochs", "1", "--methods", "non-private", *SHORT, "--output", str(tmp_path))
    assert answer.exit_code == 1
    assert answer.stderr.startswith("Error: ") and answer.stderr.count("\n") == 1
    assert "NonPrivate" in answer.stdout  # the table is not lost


def test_options_that_do_not_parse_are_refused() -> None:
    assert lsg("demo", "--epochs", "many").exit_code == 2
    assert lsg("demo", "--no-such-option").exit_code == 2


def test_training_that_diverges_is_reported_and_not_hidden(tmp_path: Path) -> None:
    answer = lsg("demo", "--epochs", "1", "--methods", "lsg", "--lr", "1e30", *SHORT, "--output", str(tmp_path))
    assert answer.exit_code == 0, answer.output
    found = runs(tmp_path)["LSG(r=8, p=0.5)", 3.0]
    assert found["test_accuracy"] < 0.5 and math.isfinite(found["epsilon"])


def test_version_and_help() -> None:
    assert lsg("--version").stdout == f"lsg {__version__}\n"
    assert "demo" in lsg("--help").stdout
    assert "--max-grad-norm" in lsg("demo", "--help").stdout


def test_the_thread_count_is_left_as_it_was(tmp_path: Path) -> None:
    torch.set_num_threads(2)  # the fixture above puts it back
    lsg("demo", "--epochs", "1", "--methods", "non-private", *SHORT, "--output", str(tmp_path))
    assert torch.get_num_threads() == 2


def test_a_figure_of_a_single_method_without_times(tmp_path: Path) -> None:
    save_demo_figure(tmp_path / "one.png", {"LSG": {"ε = 3": (0.5, 0.02)}}, {}, titles=("one", "left", "right"))
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_provenance_outside_a_checkout_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lsg.train.provenance.__file__", str(tmp_path / "lsg" / "train" / "provenance.py"))
    found = provenance()
    assert found["commit"] is None and found["modified"] is None
    assert found["hardware"]["cpu"] and found["hardware"]["cores"] >= 1
