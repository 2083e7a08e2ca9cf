"""Reading output folders: what is found, what is incomplete, and which file is at fault."""

import json
from pathlib import Path

import pytest

from lsg.errors import ConfigurationError
from lsg.report import find_runs
from tests.report.run_folders import write_run


def test_runs_are_found_below_folders_once_each(tmp_path: Path) -> None:
    first = write_run(tmp_path / "grid" / "a")
    write_run(tmp_path / "grid" / "b", seed=1)
    write_run(first / "model" / "inner")  # what a run keeps inside is no run
    runs = find_runs([tmp_path / "grid", first])
    assert [run.name for run in runs] == ["a", "b"]
    assert find_runs([first])[0].name == "a"


def test_a_run_without_a_result_is_incomplete_and_has_its_last_epoch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", complete=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "sco')  # killed while writing
    (run,) = find_runs([folder])
    assert not run.complete and run.config["method"] == "lsg" and run.epsilon == run.history[-1].epsilon
    assert [epoch.epoch for epoch in run.history] == [1, 2, 3]


def test_an_epoch_written_twice_counts_as_the_last(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", complete=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "score": 0.25, "epsilon": null, "loss": NaN}\n')
    (run,) = find_runs([folder])
    assert run.score == 0.25 and run.epsilon is None and run.loss is None and len(run.history) == 3


@pytest.mark.parametrize(
    ("name", "text", "culprit"),
    [
        ("result.json", '{"config": ', "line 1"),
        ("result.json", "[" * 100_000, "not JSON"),
        ("result.json", "1" * 5000, "not JSON"),
        ("result.json", "[]", "must be a JSON object"),
        ("result.json", "{}", "'config' is missing"),
        ("result.json", '{"config": 1, "score": 1, "history": []}', "'config'"),
        ("result.json", '{"config": {}, "score": "high", "history": []}', "'score' must be a number"),
        ("result.json", '{"config": {}, "score": 91.2, "history": []}', "fraction"),
        ("result.json", '{"config": {}, "score": 1, "history": {}}', "'history' must be a list"),
        ("result.json", '{"config": {}, "score": 1, "history": [{"epoch": "1"}]}', "history row 1"),
        ("result.json", '{"config": {}, "score": 1, "history": [], "privacy": "yes"}', "'privacy'"),
        ("metrics.jsonl", '{"epoch": 1}\nnonsense\n', "line 2"),
        ("config.toml", "task = ", "TOML"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, name: str, text: str, culprit: str) -> None:
    folder = write_run(tmp_path / "run", complete=name == "result.json")
    (folder / name).write_text(text)
    with pytest.raises(ConfigurationError, match=culprit) as caught:
        find_runs([folder])
    assert str(folder / name) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "result.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"result\.json: not UTF-8"):
        find_runs([folder])


def test_folders_without_runs_are_named(tmp_path: Path) -> None:
    for path, culprit in ((tmp_path, "holds no run"), (tmp_path / "none", "no such folder")):
        with pytest.raises(ConfigurationError, match=culprit):
            find_runs([path])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="not a folder"):
        find_runs([tmp_path / "file"])


def test_numbers_beyond_reason_are_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    result["epsilon"], result["history"][0]["loss"] = 10**400, 1e300
    (folder / "result.json").write_text(json.dumps(result))
    (run,) = find_runs([folder])
    assert run.epsilon is None and run.history[0].loss is None
