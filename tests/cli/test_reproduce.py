"""`lsg reproduce`, with a fake run: what it writes, skips, resumes, refuses and reports."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lsg.cli import app
from lsg.reproduce.intensity import Intensity
from lsg.train.config import RunConfig
from tests.support.fake_run import FakeRun, Killed


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake = FakeRun()
    values = np.random.default_rng(0).random((30, 20))
    monkeypatch.setattr("lsg.train.run.run", fake)
    monkeypatch.setattr(
        "lsg.reproduce.intensity.run_intensity",
        lambda config, layer, trained: Intensity(layer or "fc1", values, values),
    )
    return fake


def lsg(folder: Path, *arguments: str) -> Any:
    options = ("--scale", "cpu-minutes", "--output", str(folder), "--seeds", "1")
    return CliRunner().invoke(app, ["reproduce", *arguments, *options], env={"COLUMNS": "120"})


def test_all_runs_each_cell_once_and_indexes_what_it_wrote(tmp_path: Path, fake: FakeRun) -> None:
    answer = lsg(tmp_path, "all")
    assert answer.exit_code == 0, answer.output
    assert len(fake.calls) == len(set(fake.names)) == 33
    index = (tmp_path / "README.md").read_text()
    linked = re.findall(r"\]\(([\w.-]+)\)", index)
    assert {"table1.md", "table2.csv", "figure-weights.svg", "figure-epsilon.png", "negatives.md", "cells"} <= {*linked}
    assert all((tmp_path / name).exists() for name in linked)
    assert "16 of 16" in index and "Not run" not in index and "Failed" not in index and '"commit"' in index
    kept = [path.parent.name for path in tmp_path.glob("cells/*/model")]
    assert kept == ["digits-non-private-seed0"]  # figure-weights looks at it

    again = lsg(tmp_path, "all")
    assert again.exit_code == 0 and len(fake.calls) == 33 and "33 complete, 0 to run" in again.output


def test_killed_it_goes_on_where_it_was(tmp_path: Path, fake: FakeRun) -> None:
    def die(config: RunConfig, output: Path) -> None:
        if len(fake.calls) == 5:
            raise Killed

    fake.before_result = die
    with pytest.raises(Killed):
        lsg(tmp_path, "table1")
    fake.before_result = lambda config, output: None
    assert lsg(tmp_path, "table1").exit_code == 0
    assert [resumed for _, resumed in fake.calls] == [False] * 5 + [True] + [False] * 11
    assert fake.names[4] == fake.names[5] and len(set(fake.names)) == 16


def test_a_failing_cell_is_reported_and_the_rest_go_on(tmp_path: Path, fake: FakeRun) -> None:
    def fail(config: RunConfig, output: Path) -> None:
        if config.method == "rgp" and config.rank == 4:
            raise RuntimeError("out of memory")

    fake.before_result = fail
    answer = lsg(tmp_path, "table1")
    assert answer.exit_code == 1
    assert "Failed: digits-rgp-r4-eps3.3-seed0: RuntimeError: out of memory" in answer.output
    assert len(fake.calls) == 16 and (tmp_path / "table1.md").is_file()
    index = (tmp_path / "README.md").read_text()
    assert "15 of 16" in index and "digits-rgp-r4-eps3.3-seed0: RuntimeError" in index


def test_a_study_that_cannot_be_drawn_is_reported_by_name(
    tmp_path: Path, fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("no such layer")

    monkeypatch.setattr("lsg.reproduce.intensity.run_intensity", fail)
    answer = lsg(tmp_path, "all", "--only", "*-non-private-*")
    assert answer.exit_code == 1 and "Failed: figure-weights: no such layer" in answer.output
    assert (tmp_path / "negatives.md").is_file()


def test_only_runs_the_cells_that_match_and_says_what_is_left(tmp_path: Path, fake: FakeRun) -> None:
    assert lsg(tmp_path, "table2", "--only", "digits-lsg-*").exit_code == 0
    assert len(fake.names) == 4 and all(name.startswith("digits-lsg-") for name in fake.names)
    index = (tmp_path / "README.md").read_text()
    assert "4 of 17" in index and "- digits-dpsgd-eps0.8-seed0" in index
    answer = lsg(tmp_path, "table2", "--only", "x")
    assert answer.exit_code == 2 and "--only 'x' matches none of 17 cells" in answer.output


def test_results_of_other_settings_are_not_reused(tmp_path: Path, fake: FakeRun) -> None:
    assert lsg(tmp_path, "table2", "--only", "digits-lsg-*-eps0.8-*").exit_code == 0
    answer = lsg(tmp_path, "table2", "--model", "image=wrn28-2")
    assert answer.exit_code == 2 and len(fake.calls) == 1
    assert "made with model = small-cnn, now wanted with wrn28-2; choose another --output" in answer.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table3"], "study 'table3' is unknown; choose from figure-weights"),
        (["table1", "--model", "small-cnn"], "--model 'small-cnn' must be TASK=VALUE"),
        (["table1", "--model", "image=a", "--model", "image=b"], "--model 'image=b': image is given twice"),
        (["table1", "--data", "sst2=/x"], "--data sst2=/x: scale 'cpu-minutes' has digits, image"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, fake: FakeRun, arguments: list[str], message: str) -> None:
    answer = lsg(tmp_path / "new", *arguments)
    assert answer.exit_code == 2 and message in answer.output and not (tmp_path / "new").exists()


def test_a_real_run_is_trained_and_drawn(tmp_path: Path) -> None:
    """The one test here that trains: 20 epochs of a small CNN."""
    answer = lsg(tmp_path, "figure-weights")
    assert answer.exit_code == 0, answer.output
    drawn = (tmp_path / "figure-weights.svg").read_text()
    assert "digits, small-cnn (stand-in for SST-2), after non-private training: convs.1.weight" in drawn
    assert re.search(r"1 of 1  digits-non-private-seed0: 9\d\.\d %", answer.output)

    answer = lsg(tmp_path, "figure-weights", "--layer", "convs.7")
    assert answer.exit_code == 1 and "Failed: figure-weights: --layer 'convs.7' is none of" in answer.output


@pytest.mark.parametrize("name", ["table2.md", "table2.csv", "README.md", "figure-epsilon.svg"])
def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path, fake: FakeRun, name: str) -> None:
    (tmp_path / f"{name}.partial").symlink_to("/dev/full")
    answer = lsg(tmp_path, "figure-epsilon" if name.startswith("figure") else "table2")
    assert answer.exit_code == 1
    assert answer.stderr.count("\n") == 1
    assert answer.stderr.endswith(f"cannot write {tmp_path / name} (No space left on device)\n")
    assert not (tmp_path / name).exists() and not list(tmp_path.glob("*.partial"))


def test_the_index_names_no_path(tmp_path: Path, fake: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["lsg", "reproduce", "--data", "text=/home/jane/x", "--output", str(tmp_path), "~/y"]
    )
    assert lsg(tmp_path, "table2", "--only", "digits-lsg-*").exit_code == 0
    index = (tmp_path / "README.md").read_text()
    assert "lsg reproduce --data text=PATH --output PATH" in index
    assert "jane" not in index and str(tmp_path) not in index and "~" not in index
