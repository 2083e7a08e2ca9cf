"""The results store: names, what counts as complete, what is refused, summaries over seeds."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from lsg.errors import ConfigurationError
from lsg.reproduce.store import Store, cell_name
from lsg.train.config import RunConfig
from lsg.train.folder import RunFolder
from lsg.train.run import run
from tests.support.fake_run import CURVE, FakeRun, score_of

LSG = RunConfig(task="sst2", model="roberta-base", epsilon=3.3)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "sst2-lsg-r8-p0.5-eps3.3-seed0"),
        ({"importance": "random", "seed": 2}, "sst2-lsg-random-r8-p0.5-eps3.3-seed2"),
        ({"method": "rgp", "rank": 2}, "sst2-rgp-r2-eps3.3-seed0"),
        ({"method": "sparse-dpsgd", "sparsity": 0.1}, "sst2-sparse-dpsgd-p0.1-eps3.3-seed0"),
        ({"method": "dpsgd", "epsilon": None, "noise_multiplier": 1.27}, "sst2-dpsgd-sigma1.27-seed0"),
        ({"method": "non-private", "epsilon": None}, "sst2-non-private-seed0"),
    ],
)
def test_a_cells_name_says_what_the_method_depends_on(changes: dict, name: str) -> None:
    assert cell_name(replace(LSG, **changes)) == name


def test_a_result_counts_only_for_the_settings_that_made_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "cells")
    assert store.outcome(LSG) is None
    store.train(LSG, FakeRun())
    outcome = store.outcome(LSG)
    assert outcome is not None
    assert (outcome.score, outcome.epsilon, outcome.curve) == (score_of(LSG), 3.3, (*CURVE, score_of(LSG)))
    with pytest.raises(ConfigurationError, match=r"seed0/result\.json: made with lr = 0\.001, now wanted with 0\.002"):
        store.outcome(replace(LSG, lr=0.002))
    with pytest.raises(ConfigurationError, match=r"made with data = None, now wanted with /data"):
        store.outcome(replace(LSG, data="/data"))


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.path(LSG).mkdir()
    for text in ("{", "[]", "{}", '{"score": 0.5, "score": 0.9}', '{"config": {"lr": 1, "lr": 2}}'):
        (store.path(LSG) / "result.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"seed0/result\.json: not a result"):
            store.outcome(LSG)


def test_a_cell_folder_that_holds_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for content in ("notes.txt", "checkpoint/notes.txt"):
        notes = store.path(LSG) / content
        notes.parent.mkdir(parents=True, exist_ok=True)
        notes.write_text("years of work")
        with pytest.raises(ConfigurationError, match="this folder is not empty and holds no run of lsg train"):
            store.train(LSG, run)
        assert notes.read_text() == "years of work"


def test_a_cell_begun_with_other_settings_is_refused_and_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    begun = RunFolder(store.path(LSG))
    with begun.held(LSG, resume=False):
        begun.create(LSG)
    with pytest.raises(ConfigurationError, match=r"was begun with --lr 0\.001 \(now 0\.002\)"):
        store.train(replace(LSG, lr=0.002), run)
    assert (store.path(LSG) / "config.toml").is_file()


def test_a_summary_is_over_the_seeds_that_are_there(tmp_path: Path) -> None:
    store, fake = Store(tmp_path), FakeRun()
    assert store.summary(LSG, range(3)) is None
    store.train(replace(LSG, seed=1), fake)
    one = store.summary(LSG, range(3))
    assert one is not None and (one.seeds, one.std) == (1, None)
    store.train(LSG, fake)
    two = store.summary(LSG, range(3))
    scores = [100 * score_of(replace(LSG, seed=seed)) for seed in (0, 1)]
    assert two is not None and two.seeds == 2
    assert two.mean == pytest.approx(statistics.fmean(scores))
    assert two.std == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)  # of a sample: n - 1
    assert two.curve == pytest.approx([25, 50, two.mean])
