"""`lsg train`: options before file before preset, the whole way to a model, and one line for every mistake."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lsg.cli import app
from lsg.cli.run_bar import RunBar
from lsg.cli.run_settings import run_settings
from lsg.train.config import RunConfig, option
from lsg.train.config_file import read_settings
from lsg.train.listener import Listener
from tests.support.threads import one_thread  # noqa: F401 - a fixture for all tests here
from tests.support.tiny import glue_sst2, tiny_bert

FAST = ("--task", "digits", "--epochs", "2", "--accountant", "rdp", "--device", "cpu", "--recipe", "paper")


def lsg(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "150"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("train") / "run"
    answer = lsg("train", *FAST, "--epsilon", "3", "--seed", "7", "--output", folder)
    assert answer.exit_code == 0, answer.output
    return folder, answer.stdout


def test_every_setting_has_an_option() -> None:
    shown = lsg("train", "--help").stdout
    for field in dataclasses.fields(RunConfig):
        assert f"{option(field.name)} " in shown, field.name
    for own in ("--output", "--config", "--resume", "--checkpoint-every"):
        assert own in shown


def test_a_run_tells_what_it_did(finished: tuple[Path, str]) -> None:
    folder, shown = finished
    result = json.loads((folder / "result.json").read_text())
    assert result["config"]["seed"] == 7 and result["config"]["batch_size"] == 512  # the preset's
    assert 2.9 < result["epsilon"] <= 3.0
    assert f"{100 * result['score']:.2f} %" in shown and "ε = 3.00" in shown
    assert shown.count("loss") == shown.count("not private: loss") > 0
    assert shown.count("signal/noise") == shown.count("loss") and "clipped 100 %" in shown
    assert result["privacy"]["statement"] in shown
    assert "scikit-learn digits: 1,437 records for training, 360 for test; labels 0, 1" in shown
    assert "epoch 1: score" in shown and "epoch 2: score" in shown  # not a terminal: lines instead of a bar


def test_the_first_line_of_a_bad_result_is_the_warning(tmp_path: Path) -> None:
    answer = lsg("train", *FAST, "--epsilon", "3", "--max-grad-norm", "1e5", "--output", tmp_path / "run")
    assert answer.exit_code == 0, answer.output
    before, result = answer.stdout.split("epoch 2: ")
    assert before.count("noise drowns the signal") == before.count("nothing is clipped") == 1  # when it was clear
    lines = [line for line in result.splitlines()[1:] if line.strip() and "━" not in line]
    assert [line.partition(":")[0] for line in lines[:2]] == ["WARNING", "WARNING"]
    assert "noise drowns the signal" in result and "nothing is clipped" in result
    again = lsg("train", "--resume", "--output", tmp_path / "run").stdout
    assert again.startswith("WARNING: ")


def test_resume_needs_no_other_option_and_repeats_nothing(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    before = (folder / "result.json").read_bytes()
    assert lsg("train", "--resume", "--output", folder).exit_code == 0
    assert (folder / "result.json").read_bytes() == before


def test_resume_with_another_option_names_it(finished: tuple[Path, str]) -> None:
    answer = lsg("train", "--resume", "--output", finished[0], "--epsilon", "4", "--epochs", "2")
    assert answer.exit_code == 2
    assert answer.stderr.splitlines() == [
        f"Error: --resume: the run in {finished[0]} was begun with --epsilon 3.0 (now 4.0)"
    ]


def test_a_written_configuration_repeats_the_run(finished: tuple[Path, str], tmp_path: Path) -> None:
    answer = lsg("train", "--config", finished[0] / "config.toml", "--output", tmp_path / "again")
    assert answer.exit_code == 0, answer.output
    for name in ("config.toml", "privacy.json", "model/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (finished[0] / name).read_bytes(), name


def test_options_come_before_the_file_and_the_file_before_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("task: digits\nrecipe: paper\nepsilon: 2\nlr: 1e-1\nepochs: 5\n")
    found = run_settings(tmp_path / "run", file, False, {"epochs": 6, "rank": 4}, Listener())
    assert (found.epsilon, found.lr, found.epochs, found.rank) == (2.0, 0.1, 6, 4)
    assert (found.model, found.optimizer, found.batch_size) == ("small-cnn", "sgd", 512)


def test_a_budget_on_the_command_line_replaces_the_one_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('task = "digits"\nepsilon = 2\n')
    found = run_settings(tmp_path / "run", file, False, {"noise_multiplier": 1.5}, Listener())
    assert (found.epsilon, found.noise_multiplier) == (None, 1.5)
    plain = run_settings(tmp_path / "run", file, False, {"method": "non-private"}, Listener())
    assert plain.epsilon is None and plain.lr == 0.05


def test_without_a_seed_a_secret_one_is_drawn(tmp_path: Path) -> None:
    seeds = {run_settings(tmp_path, None, False, {"task": "digits", "epsilon": 1.0}, Listener()).seed for _ in range(3)}
    assert len(seeds) == 3 and all(seed > 2**32 for seed in seeds)  # false alarm: 3 in 2^31


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "3"], "--task is missing: one of sst2"),
        (["--task", "sst3", "--epsilon", "3"], "--task 'sst3' is not known (did you mean sst2?)"),
        (["--task", "sst2", "--model", "wrn28-2", "--epsilon", "3"], "--model wrn28-2 is for images"),
        (["--resume"], "--resume: "),
        (["--task", "digits"], "--method lsg needs --epsilon or --noise-multiplier"),
        (["--task", "digits", "--epsilon", "3", "--method", "dp"], "--method 'dp' must be one of"),
        (["--task", "digits", "--epsilon", "3", "--rank", "0"], "rank=0"),
        (["--task", "digits", "--epsilon", "3", "--batch-size", "5000"], "--batch-size 5000 is more than the 1,437"),
        (["--task", "digits", "--epsilon", "3", "--device", "cuda:77"], "--device cuda:77 cannot be used"),
        (["--task", "sst2", "--epsilon", "3", "--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--config", "/nowhere/at/all.toml"], "--config /nowhere/at/all.toml: cannot be read"),
        (["--task", "digits", "--epsilon", "0.0001", "--delta", "1e-300"], "target_epsilon=0.0001 cannot be reached"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments: list[str], message: str, tmp_path: Path) -> None:
    answer = lsg("train", *arguments, "--output", tmp_path / "run")
    assert answer.exit_code == 2
    assert answer.stderr.startswith("Error: ") and len(answer.stderr.splitlines()) == 1
    assert message in answer.stderr
    assert not answer.stdout.startswith("\n")  # an empty progress bar
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_row_and_a_model_without_classifier_are_named(tmp_path: Path) -> None:
    data, model = glue_sst2(tmp_path / "SST-2"), tiny_bert(tmp_path / "bert")
    budget = ("--epsilon", "3", "--task", "sst2", "--output", tmp_path / "run")
    with (data / "train.tsv").open("a") as file:
        file.write("the film was cut o")
    answer = lsg("train", *budget, "--data", data, "--model", model)
    assert answer.exit_code == 2 and "train.tsv" in answer.stderr and "98" in answer.stderr
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"model_type": "clip_vision_model"}))
    answer = lsg("train", *budget, "--data", glue_sst2(tmp_path / "whole"), "--model", model)
    assert answer.exit_code == 2 and str(model) in answer.stderr
    assert not (tmp_path / "run").exists()


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Any, done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    for every, told in ((1, "Go on with"), (0, "There is no checkpoint yet. Start over with")):
        output = tmp_path / str(every)
        with monkeypatch.context() as patch:
            patch.setattr(RunBar, "step", stop)
            answer = lsg("train", *FAST, "--epsilon", "3", "--output", output, "--checkpoint-every", every)
        assert answer.exit_code == 130
        assert f"{told}: lsg train --resume --output {output}" in answer.stdout
        assert lsg("train", "--resume", "--output", output).exit_code == 0


def test_a_full_disk_ends_the_command_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("lsg.files.atomic.create_secret", lambda path: path.symlink_to("/dev/full"))
    answer = lsg("train", *FAST, "--epsilon", "3", "--output", tmp_path / "run")
    assert answer.exit_code == 1
    assert answer.stderr == f"Error: cannot write {tmp_path / 'run' / 'config.toml'} (No space left on device)\n"
    assert list((tmp_path / "run").iterdir()) == []


def test_texts_by_local_folder_the_whole_way(tmp_path: Path) -> None:
    answer = lsg(
        *("train", "--task", "sst2", "--data", glue_sst2(tmp_path / "SST-2"), "--model", tiny_bert(tmp_path / "bert")),
        *("--method", "lsg", "--epsilon", "8", "--delta", "1e-3", "--rank", "2", "--batch-size", "24", "--epochs", "2"),
        *("--max-length", "32", "--device", "cpu", "--output", tmp_path / "run", "--recipe", "paper"),
    )
    assert answer.exit_code == 0, answer.output
    assert "accuracy on dev" in answer.stdout and "new, seeded weights for classifier.bias" in answer.stdout
    assert read_settings(tmp_path / "run" / "config.toml")["head_scale"] == 0.1  # GLUE's preset
