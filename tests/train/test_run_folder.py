"""A run's folder: secret files are the owner's, one process works in it, a full disk leaves no half of a file."""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lsg import ConfigurationError
from lsg.files.atomic import atomic_path, create_secret
from lsg.train.config import RunConfig
from lsg.train.folder import RunFolder
from lsg.train.listener import Listener, RunStart
from lsg.train.run import RunResult, run
from tests.support.train_runs import DIGITS, CrashAt, CrashError, same, strict

# --- secrets, and one process at a time ------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_secret_files_are_their_owners_from_the_first_byte(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    for before in (None, 0o644):  # a new file, and one that an older lsg let everybody read
        if before is not None:
            target.chmod(before)
        with atomic_path(target, secret=True) as partial:
            assert mode(partial) == 0o600 and partial.stat().st_size == 0
            partial.write_text("x")
        assert mode(target) == 0o600


def test_what_holds_the_seed_or_losses_is_the_owners_alone_and_says_so(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with pytest.raises(CrashError):
            run(DIGITS, tmp_path / "run", listener=CrashAt(step=2), checkpoint_every=1)
        modes = {str(p.relative_to(tmp_path)): mode(p) for p in tmp_path.rglob("*")}
        run(DIGITS, tmp_path / "run", resume=True)
        modes |= {str(p.relative_to(tmp_path)): mode(p) for p in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    for name in ("config.toml", "metrics.jsonl", "result.json", "checkpoint/state.safetensors"):
        assert modes[f"run/{name}"] == 0o600, name
    for name in ("run", "run/checkpoint", "run/tensorboard"):
        assert modes[name] == 0o700, name
    assert modes["run/privacy.json"] == 0o666  # as the umask says: it is made to be released
    assert "SECRET" in (tmp_path / "run" / "config.toml").read_text().splitlines()[0]
    assert "SECRET" in strict(tmp_path / "run" / "result.json")["secret"]


HOLD = """
import sys, time, torch
from pathlib import Path
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.run import run
class Wait(Listener):
    def step(self, done):
        print("training", flush=True)
        time.sleep(600)
torch.set_num_threads(1)
run(RunConfig(**{settings!r}), Path({folder!r}), listener=Wait(), checkpoint_every=1)
"""


def test_a_folder_serves_one_process_at_a_time_and_a_killed_one_lets_go(
    finished: tuple[Path, RunResult], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    program = HOLD.format(settings=DIGITS.to_dict(), folder=str(folder))
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "training\n"
        before = sorted(folder.rglob("*"))
        with pytest.raises(ConfigurationError, match=rf"--output {folder}: process {other.pid} is at work there"):
            run(DIGITS, folder, resume=True)
        assert sorted(folder.rglob("*")) == before
    finally:
        other.kill()
        other.communicate()
    run(DIGITS, folder, resume=True)
    same(folder, finished[0])
    assert not (folder / "lock").exists()


def test_two_new_runs_in_one_folder_are_refused_before_either_writes(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with (
        first.held(DIGITS, resume=False),
        pytest.raises(ConfigurationError, match=rf"process {os.getpid()} is at work there"),
        second.held(replace(DIGITS, seed=2), resume=False),
    ):
        pass
    assert list(tmp_path.iterdir()) == []  # the first one wrote nothing, and leaves nothing


def test_a_run_that_ended_while_another_waited_for_its_lock_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, check = RunFolder(tmp_path / "run"), RunFolder.check

    def after_check(self: RunFolder, config: RunConfig, *, resume: bool) -> None:
        check(self, config, resume=resume)
        if not (tmp_path / "run").exists():  # another process begins and stops between the first check and the lock
            monkeypatch.setattr(RunFolder, "check", check)
            other = RunFolder(tmp_path / "run")
            with other.held(DIGITS, resume=False):
                other.create(DIGITS)

    monkeypatch.setattr(RunFolder, "check", after_check)
    with (
        pytest.raises(ConfigurationError, match="holds a run already"),
        folder.held(replace(DIGITS, seed=2), resume=False),
    ):
        pass


# --- a full disk ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file on a disk that is always full")
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "privacy.json", "result.json"])
def test_a_full_disk_is_told_in_one_line_and_leaves_no_half_of_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def fill(path: Path) -> None:
        if path.name != f"{name}.partial":
            create_secret(path)
        elif name != "metrics.jsonl" or (folder / name).exists():  # metrics without rows are written first
            path.symlink_to("/dev/full")

    class Fill(Listener):
        def started(self, start: RunStart) -> None:
            if name == "privacy.json":  # it is no secret
                (folder / f"{name}.partial").symlink_to("/dev/full")

    config = replace(DIGITS, epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr("lsg.files.atomic.create_secret", fill)
        with pytest.raises(OSError, match=rf"cannot write .*{name} \(No space left on device\)"):
            run(config, folder, listener=Fill())
    assert name == "metrics.jsonl" or not (folder / name).exists()
    assert not (folder / "result.json").exists()
    assert not list(folder.glob("*.partial"))
    assert len(run(config, folder, resume=True).history) == 1  # there is room again


def test_a_full_disk_while_the_model_is_written_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = replace(DIGITS, epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr("safetensors.torch.save_file", full)
        with pytest.raises(OSError, match=r"cannot write .*model \(No space left on device\)"):
            run(config, tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.toml", "metrics.jsonl", "tensorboard"]
    run(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "result.json").exists()
