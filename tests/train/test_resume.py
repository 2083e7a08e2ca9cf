"""A run that is cut off: nothing is lost, and what goes on ends as if it had never stopped."""

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lsg.train.config import RunConfig
from lsg.train.run import RunResult, run
from tests.support.train_runs import DIGITS, CrashAt, CrashError, rows, same, scalars, weights


@pytest.mark.parametrize(
    ("crash", "every"),
    [
        (CrashAt(step=1), 2),  # before the first checkpoint
        (CrashAt(step=5), 2),  # in the middle of an epoch
        (CrashAt(step=6), 1),  # just before an epoch's end
        (CrashAt(epoch=2), 1),  # between an epoch's row and its checkpoint
        (CrashAt(epoch=3), 3),  # after the last epoch, before the result
    ],
)
def test_a_crash_costs_nothing(crash: CrashAt, every: int, finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        run(DIGITS, tmp_path / "run", listener=crash, checkpoint_every=every)
    assert not (tmp_path / "run" / "result.json").exists()
    run(DIGITS, tmp_path / "run", resume=True, checkpoint_every=every)
    same(tmp_path / "run", finished[0])
    assert scalars(tmp_path / "run").keys() == scalars(finished[0]).keys()
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_sigkill_in_the_middle_of_an_epoch_and_resume_end_as_an_uninterrupted_run(
    texts: RunConfig, tmp_path: Path
) -> None:
    program = f"""
import os, signal, torch
from pathlib import Path
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.run import run
class Kill(Listener):
    def step(self, done):
        if done == 6:
            os.kill(os.getpid(), signal.SIGKILL)
torch.set_num_threads(1)
run(RunConfig(**{texts.to_dict()!r}), Path({str(tmp_path / "killed")!r}), listener=Kill(), checkpoint_every=3)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert answer.returncode == -signal.SIGKILL, answer.stderr
    assert (tmp_path / "killed" / "checkpoint").exists() and len(rows(tmp_path / "killed")) == 1
    run(texts, tmp_path / "killed", resume=True)
    run(texts, tmp_path / "whole")
    same(tmp_path / "killed", tmp_path / "whole")


def test_resuming_a_complete_run_gives_its_result(finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    (tmp_path / "run" / "checkpoint").mkdir()  # killed just before it was removed
    assert run(DIGITS, tmp_path / "run", resume=True, listener=CrashAt(step=1)) == finished[1]
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_resuming_nothing_starts_a_run(tmp_path: Path) -> None:
    assert len(run(replace(DIGITS, epochs=1), tmp_path / "run", resume=True).history) == 1


def test_checkpoints_after_epochs_are_written_when_they_are_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CrashError):
        run(DIGITS, tmp_path / "quick", listener=CrashAt(epoch=3))
    assert not (tmp_path / "quick" / "checkpoint").exists()
    monkeypatch.setattr("lsg.train.checkpoints.SECONDS_BETWEEN", 0.0)
    with pytest.raises(CrashError):
        run(DIGITS, tmp_path / "slow", listener=CrashAt(epoch=3))
    assert (tmp_path / "slow" / "checkpoint").exists()


def test_averaged_weights_and_a_warm_up_go_on_as_if_nothing_had_stopped(
    finished: tuple[Path, RunResult], tmp_path: Path
) -> None:
    config = replace(DIGITS, averaging=0.2, warmup=0.3)
    whole = run(config, tmp_path / "whole")
    with pytest.raises(CrashError):
        run(config, tmp_path / "run", listener=CrashAt(step=5), checkpoint_every=2)
    run(config, tmp_path / "run", resume=True)
    same(tmp_path / "run", tmp_path / "whole")
    assert whole.noise_multiplier == finished[1].noise_multiplier and whole.epsilon == finished[1].epsilon


def test_scored_and_saved_weights_are_the_averaged_ones(finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    averaged = run(replace(DIGITS, averaging=1e-9), tmp_path / "last")  # the last weights, by another way
    assert averaged.curve == finished[1].curve and weights(tmp_path / "last") == weights(finished[0])
    run(replace(DIGITS, averaging=1.0), tmp_path / "mean")
    assert [row["loss"] for row in rows(tmp_path / "mean")] == [row["loss"] for row in rows(finished[0])]
    assert weights(tmp_path / "mean") != weights(finished[0])


def test_a_run_begun_before_a_setting_existed_goes_on(finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        run(DIGITS, tmp_path / "run", listener=CrashAt(step=5), checkpoint_every=2)
    settings = tmp_path / "run" / "config.toml"
    kept = [line for line in settings.read_text().splitlines() if not line.startswith(("averaging", "warmup"))]
    settings.write_text("\n".join(kept) + "\n")
    run(DIGITS, tmp_path / "run", resume=True)
    same(tmp_path / "run", finished[0])
