"""`lsg train` on several processes: the run of one process, one folder, one ledger; errors end all of them alike."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from lsg.accounting import create_accountant
from lsg.accounting.ledger import Ledger
from lsg.cli import app
from lsg.train.config import RunConfig
from lsg.train.run import RunResult, run
from tests.support.killed_ranks import RANKS, RUN, free_port, kill_ranks
from tests.support.language import tiny_llama, written
from tests.support.ranks import on_ranks
from tests.support.train_runs import rows, same, scalars, strict
from tests.train.ranks_runs import BUDGET, on_each

COMMAND = """
import sys
from lsg import cli
from lsg.errors import PrivacyError
from lsg.train.epoch_signals import SignalSums
import os, signal
plain, taken = SignalSums.plus, 0
def plus(self, signals):
    global taken
    taken += 1
    if taken == 3 and os.environ["RANK"] == "1":
        END
    return plain(self, signals)
SignalSums.plus = plus
cli.run()
"""
FAILS, INTERRUPTED = 'raise PrivacyError("rank 1 has had enough")', "os.killpg(0, signal.SIGINT)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def undropped(folder: Path, texts: RunConfig) -> RunConfig:
    """Texts, and a model without dropout: each process would drop out other things."""
    model = folder / "bert"
    shutil.copytree(texts.model, model)
    settings = json.loads((model / "config.json").read_text())
    settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (model / "config.json").write_text(json.dumps(settings))
    return replace(texts, model=str(model))


@pytest.fixture(scope="module")
def letters(folder: Path, texts: RunConfig) -> RunConfig:
    """A language model, which shows samples."""
    model, data = tiny_llama(folder / "llama"), written(folder / "documents")
    return replace(texts, task="generate", data=str(data), model=str(model), averaging=0.5, epochs=2)


@pytest.fixture(scope="module")
def told(folder: Path, undropped: RunConfig, letters: RunConfig) -> list[dict[str, str]]:
    return on_ranks(2, on_each, folder, undropped, letters, seconds=600)


def distance(one: Path, other: Path) -> float:
    mine, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)


def test_several_processes_give_the_run_of_one(
    folder: Path,
    told: Any,
    finished: tuple[Path, RunResult],
    undropped: RunConfig,
    letters: RunConfig,
    tmp_path: Path,
) -> None:
    run(undropped, tmp_path / "texts")
    run(letters, tmp_path / "letters")
    for row, expected in zip(rows(folder / "letters"), rows(tmp_path / "letters"), strict=True):
        assert row.pop("scores") == pytest.approx(expected.pop("scores"), rel=1e-4)
        assert row.pop("measure") == expected.pop("measure") == "perplexity"
        assert row == pytest.approx(expected, rel=1e-4)
    assert distance(folder / "letters", tmp_path / "letters") < 1e-5
    for mine, alone in ((folder / "ranks", finished[0]), (folder / "texts", tmp_path / "texts")):
        assert distance(mine, alone) < 1e-5
        for row, expected in zip(rows(mine), rows(alone), strict=True):
            assert row.pop("scores") == expected.pop("scores") and row.pop("measure") == expected.pop("measure")
            assert row == pytest.approx(expected, rel=1e-4)
            assert row["epsilon"] == expected["epsilon"] and row["steps"] == expected["steps"]


def test_one_folder_holds_what_one_process_leaves_and_a_ledger(
    folder: Path, told: Any, finished: tuple[Path, RunResult]
) -> None:
    assert {p.name for p in (folder / "ranks").iterdir()} == {p.name for p in finished[0].iterdir()} | {"ledger"}
    assert scalars(folder / "ranks").keys() == scalars(finished[0]).keys()
    assert Ledger(folder / "ranks" / "ledger").read().steps == finished[1].steps
    assert strict(folder / "ranks" / "result.json")["processes"] == 2
    assert strict(folder / "ranks" / "privacy.json")["processes"] == 2
    assert finished[1].processes == 1 and "processes" not in finished[1].privacy


def test_what_one_process_refuses_is_refused_on_all(folder: Path, told: list[dict[str, str]]) -> None:
    for found in told:
        assert "holds a run already: go on with it by --resume" in found["holds a run"]
        assert "--batch-size 5000 is more than the 1,437 training records" in found["batch"]
        assert found["disk"] == "OSError: no space left"
        assert "the training data differs between the processes: 0 on rank 0, 1 on rank 1" in found["wrong data"]
    assert not any((folder / name).exists() for name in ("batch", "data", "disk"))


def test_memory_that_runs_out_on_one_rank_changes_nothing(folder: Path, told: Any) -> None:
    assert distance(folder / "memory", folder / "ranks") < 1e-5


def test_a_crash_of_all_costs_nothing_on_as_many(folder: Path, told: list[dict[str, str]]) -> None:
    assert all(found["crash"].startswith("CrashError") for found in told)
    same(folder / "crashed", folder / "budget")
    assert Ledger(folder / "crashed" / "ledger").history() == Ledger(folder / "budget" / "ledger").history()


def test_another_number_pays_for_lost_steps_and_ends_with_a_model(folder: Path, told: Any) -> None:
    lost = 2  # of six, four are in the checkpoint
    whole = strict(folder / "budget" / "result.json")
    result = run(BUDGET, folder / "elsewhere", resume=True, checkpoint_every=4)
    ledger = Ledger(folder / "elsewhere" / "ledger")
    assert ledger.read().steps == result.steps == whole["steps"] and result.processes == 1
    recorded = create_accountant(BUDGET.accountant)
    recorded.history = ledger.history()
    assert result.epsilon == recorded.get_epsilon(BUDGET.delta) == whole["epsilon"] <= 3
    (warning,) = [text for text in result.warnings if text.startswith("the budget was used up")]
    assert f"of {whole['steps']} planned steps {whole['steps'] - lost} were trained and kept" in warning
    assert warning in result.privacy["warnings"] and (folder / "elsewhere" / "model").is_dir()


@pytest.mark.parametrize(("end", "said"), [(FAILS, "Error: "), (INTERRUPTED, "Stopped. ")])
def test_an_end_of_one_is_the_end_of_all_and_one_line(end: str, said: str, tmp_path: Path) -> None:
    """Without torchrun, which would end the others by itself. Ctrl-C reaches all processes of a terminal."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMMAND.replace("END", end), "train", *RUN, "--output", str(tmp_path / "run")]
    processes: list[subprocess.Popen[bytes]] = []
    with (tmp_path / "log").open("w") as log:
        for rank in range(2):
            processes.append(
                subprocess.Popen(
                    command,
                    env=os.environ | common | {"RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=processes[0].pid if processes else 0,
                )
            )
    try:
        codes = [processes[1].wait(600)]
        ended = time.monotonic()
        codes.append(processes[0].wait(30))
        assert time.monotonic() - ended < 15 and 0 not in codes, codes
    finally:
        for process in processes:
            process.kill()
    lines = (tmp_path / "log").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(("Error", "Traceback", "Stopped", "Exception"))]
    assert line.startswith(said), lines
    if end == FAILS:
        assert "rank 1 has had enough" in line
    assert (tmp_path / "run" / "checkpoint").exists()  # the run can go on


def whole(folder: Path) -> None:
    """The run of `kill_ranks`, undisturbed, without the time that torchrun takes to begin."""
    assert CliRunner().invoke(app, ["train", *RUN, "--output", str(folder)]).exit_code == 0


def test_workers_killed_under_torchrun_are_started_again_and_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    on_ranks(RANKS, whole, tmp_path / "whole", seconds=600)
    found = kill_ranks(tmp_path, 2, seed=1, elastic=True)
    assert found["kills"] == 2 and found["longest_wait_seconds"] < 30


def test_other_commands_refuse_several_processes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    answer = CliRunner().invoke(app, ["budget", "--records", "1000", "--epsilon", "1"])
    assert answer.exit_code == 2 and "Error: lsg budget works in one process" in answer.output
    monkeypatch.setenv("RANK", "1")
    assert CliRunner().invoke(app, ["budget", "--records", "1000", "--epsilon", "1"]).output == ""
