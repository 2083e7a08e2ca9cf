"""What torchrun's processes know of their launcher: who shows things, and whether an earlier start was at work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lsg.distributed import launch
from lsg.distributed.group import Group
from lsg.errors import ConfigurationError


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a job of two processes, this one being rank 1."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "_store", dist.HashStore())
    return monkeypatch


def test_a_process_that_nobody_launched_shows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not launch.launched() and launch.writes() and launch.tells_errors()
    with launch.joined() as group:
        assert group.alone


def test_the_first_process_with_an_error_tells_it_once_a_start(store: Any) -> None:
    assert launch.launched() and not launch.writes()
    assert launch.tells_errors() and not launch.tells_errors()
    store.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert launch.tells_errors() and not launch.tells_errors()
    store.setattr(launch, "_store", None)  # before they met: rank 0 does
    assert not launch.tells_errors()


def test_a_start_goes_on_where_an_earlier_one_was_at_work_and_nowhere_else(store: Any) -> None:
    def refuse(again: bool) -> None:
        if not again:
            raise ConfigurationError("it holds a run already")

    asked: list[bool] = []
    assert not launch.goes_on(Group(), "runs/new", asked.append)  # an empty place
    with pytest.raises(ConfigurationError):
        launch.goes_on(Group(), "runs/other", refuse)
    store.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert launch.goes_on(Group(), "runs/new", refuse)
    with pytest.raises(ConfigurationError):  # torchrun repeats what was refused, and it stays refused
        launch.goes_on(Group(), "runs/other", refuse)
    assert asked == [False]


@pytest.mark.parametrize("there", [0, 1])
def test_a_process_that_waits_for_one_that_died_ends_when_it_is_asked_to(there: int, tmp_path: Path) -> None:
    """Rank 0 died before it was there, or just after, so that its address never comes. torchrun asks by SIGTERM, and
    waits for half a minute. there: ranks that were, beside this one."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port)}
    place = dist.PrefixStore("lsg/start/0", agents)
    place.add("here", there)
    process = subprocess.Popen(
        [sys.executable, "-m", "lsg", "train", "--task", "digits", "--epsilon", "3", "--output", str(tmp_path / "run")],
        env=os.environ | launched | {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 100
        while place.add("here", 0) == there and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        assert process.poll() is None
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "run").exists()


def own_script(folder: Path, *words: str) -> tuple[dict[str, Any], list[Any], int]:
    """The weights that it ends with under torchrun, which starts it again once; the steps spent, and its starts after
    the first."""
    folder.mkdir()
    root = Path(__file__).parents[2]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*launcher, str(Path(__file__).with_name("restarted.py")), str(folder), *words]
    path = os.pathsep.join([str(root), *sys.path])
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr.decode()
    found: tuple[dict[str, Any], list[Any], int] = torch.load(folder / "end.pt", weights_only=False)
    return found


def test_a_script_of_ones_own_is_started_again_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """A plain init_process_group would look for the processes of the first start."""
    weights, spent, before = own_script(tmp_path / "whole")
    again, spent_again, restarts = own_script(tmp_path / "died", "die")
    assert (before, restarts) == (0, 1)
    assert spent_again == spent and sum(steps for _, _, steps in spent) == 10
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
