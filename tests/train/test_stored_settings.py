"""Runs whose settings were written by an older version: each keeps its meaning, whatever the defaults are today."""

import json
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import get_args

import pytest

from lsg import ConfigurationError
from lsg.reproduce.store import Store
from lsg.train.config import RunConfig
from lsg.train.run import RunResult, run
from lsg.train.stored_settings import HOW_COMPUTED, LACKED, computed_as, differences, stored_config
from tests.support.train_runs import DIGITS, CrashAt, CrashError, same

PUBLISHED = Path(__file__).parents[2] / "results" / "reproduce"
OLDER = replace(DIGITS, compile=False, cuda_graphs=True)  # what a run of an older version was begun with


def published_settings() -> list[dict]:
    """Of every run under results/reproduce."""
    lines = [line for file in PUBLISHED.glob("*/*.jsonl") for line in file.read_text().splitlines()]
    return [json.loads(line)["config"] for line in lines]


def test_every_setting_that_a_file_may_lack_has_what_was_done_without_it() -> None:
    """A new field fails here until `LACKED` says what older runs did."""
    in_every_file = set.intersection(*(set(settings) for settings in published_settings()))
    may_lack = {field.name for field in fields(RunConfig) if field.name not in in_every_file}
    may_lack |= {field.name for field in fields(RunConfig) if type(None) in get_args(field.type)}
    assert may_lack == LACKED.keys()


def test_what_a_file_lacks_does_not_follow_todays_defaults() -> None:
    @dataclass(frozen=True)
    class Later(RunConfig):  # the same fields with other defaults
        recipe: str = "auto"
        views: int = 4
        warmup: float = 0.1
        compile: bool | None = True
        max_physical_tokens: int | None = 2048

    assert all(field.default is not MISSING for field in fields(Later)[2:])
    oldest = min(published_settings(), key=len)
    later = Later.from_dict(oldest, "cells.jsonl", lacked=LACKED)
    assert {**vars(later)} == {**vars(stored_config(oldest, "cells.jsonl"))}
    assert (later.views, later.warmup, later.recipe, later.compile) == (1, 0.0, "paper", False)


def test_what_is_written_today_is_read_as_it_was() -> None:
    for config in (DIGITS, OLDER, replace(DIGITS, views=2, averaging=0.1, compile=True, max_physical_tokens=64)):
        assert stored_config(config.to_dict(), "config.toml") == config


def test_differences_and_what_is_left_out() -> None:
    wanted = replace(DIGITS, lr=0.1)
    assert differences(OLDER, wanted) == {"compile": (False, None), "cuda_graphs": (True, None), "lr": (0.2, 0.1)}
    assert differences(OLDER, wanted, besides=HOW_COMPUTED) == {"lr": (0.2, 0.1)}
    assert differences(OLDER, computed_as(OLDER, DIGITS)) == {}


def test_a_run_begun_with_older_defaults_goes_on(finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(CrashError):
        run(OLDER, folder, listener=CrashAt(step=5), checkpoint_every=2)
    with pytest.raises(ConfigurationError, match=r"was begun with --compile False \(now True\)"):
        run(replace(DIGITS, compile=True), folder, resume=True)
    result = run(DIGITS, folder, resume=True)  # DIGITS leaves `compile` and `cuda_graphs` to lsg
    assert result.config == OLDER
    same(folder, finished[0])
    assert run(DIGITS, folder, resume=True) == result  # complete


def test_a_cell_begun_or_done_with_older_defaults_counts(tmp_path: Path) -> None:
    store, older = Store(tmp_path), replace(OLDER, max_physical_batch_size=64)
    with pytest.raises(CrashError):
        store.train(older, run, listener=CrashAt(step=5), checkpoint_every=2)
    assert store.outcome(DIGITS) is None
    store.train(DIGITS, run)
    outcome = store.outcome(DIGITS)
    assert outcome is not None and outcome == store.outcome(older)
    with pytest.raises(ConfigurationError, match=r"made with lr = 0\.2, now wanted with 0\.1"):
        store.outcome(replace(DIGITS, lr=0.1))
