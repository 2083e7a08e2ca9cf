"""Running a grid: nothing twice, nothing lost but the cell in progress, a failing cell does not stop the rest."""

from dataclasses import replace
from pathlib import Path

import pytest

from lsg.errors import ConfigurationError
from lsg.reproduce.grid import Failure, pending, run_cells, with_seeds
from lsg.reproduce.store import Store, cell_name
from lsg.train.config import RunConfig
from tests.support.fake_run import FakeRun, Killed

BASE = RunConfig(task="digits", model="small-cnn", epsilon=3.0)
CELLS = [replace(BASE, rank=rank) for rank in (1, 2, 3, 4)]


def test_equal_cells_are_run_once_and_seed_0_of_all_comes_first() -> None:
    cells = with_seeds([CELLS[0], CELLS[1], replace(CELLS[0])], seeds=2)
    assert [(cell.rank, cell.seed) for cell in cells] == [(1, 0), (2, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_kill_loses_at_most_the_cell_in_progress(tmp_path: Path, checkpointed: bool) -> None:
    store, run = Store(tmp_path / "cells"), FakeRun()

    def die(config: RunConfig, output: Path) -> None:
        if config.rank == 3:
            if not checkpointed:
                (output / "checkpoint").rmdir()
            raise Killed

    run.before_result = die
    with pytest.raises(Killed):
        run_cells(CELLS, store, run)
    assert [cell.rank for cell in pending(CELLS, store)] == [3, 4]

    again = FakeRun()
    assert run_cells(pending(CELLS, store), store, again) == []
    assert again.calls == [(cell_name(CELLS[2]), True), (cell_name(CELLS[3]), False)]
    assert pending(CELLS, store) == []


def test_a_failing_cell_is_named_and_the_rest_go_on(tmp_path: Path) -> None:
    store, run = Store(tmp_path), FakeRun()

    def fail(config: RunConfig, output: Path) -> None:
        if config.rank == 2:
            raise RuntimeError("out of\nmemory")
        if config.rank == 3:
            raise ConfigurationError("--data x: no such file")

    run.before_result = fail
    ended = []
    failures = run_cells(CELLS, store, run, on_end=lambda cell, failure: ended.append((cell.rank, failure)))
    assert failures == [
        Failure(cell_name(CELLS[1]), "RuntimeError: out of memory"),
        Failure(cell_name(CELLS[2]), "--data x: no such file"),
    ]
    assert ended == [(1, None), (2, failures[0]), (3, failures[1]), (4, None)]
    assert "RuntimeError: out of" in (store.path(CELLS[1]) / "error.txt").read_text()

    assert run_cells(pending(CELLS, store), store, FakeRun()) == []
    assert not (store.path(CELLS[1]) / "error.txt").exists()


def test_trained_weights_are_kept_only_where_wanted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run_cells(CELLS, store, FakeRun(), keep_models=[CELLS[1]])
    assert [(store.path(cell) / "model").is_dir() for cell in CELLS] == [False, True, False, False]


def test_other_settings_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run_cells(CELLS[-1:], store, FakeRun())
    with pytest.raises(ConfigurationError, match="made with epochs = 20, now wanted with 5"):
        pending([replace(cell, epochs=5) for cell in CELLS], store)
