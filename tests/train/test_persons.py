"""Runs with --unit-column: sampling, checks, ε and every word are about persons; and a resumed run is the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lsg import ConfigurationError
from lsg.accounting import create_accountant
from lsg.cli import app
from lsg.report import find_runs, render
from lsg.train.choose import choose_settings
from lsg.train.config import RunConfig
from lsg.train.listener import Listener, RunStart
from lsg.train.run import run
from tests.support.tiny import BAD, GOOD
from tests.support.train_runs import CrashAt, CrashError, same, strict

PERSONS, RECORDS = 60, 200


def mail(folder: Path) -> Path:
    """Persons of one to nine records; half of the sentences are good."""
    folder.mkdir(parents=True)
    rows = []
    for number in range(RECORDS):
        label = number % 2
        who = number if number < PERSONS else int((number - PERSONS) ** 0.8) % PERSONS
        text = f"the film was {'very ' * (number % 7)}{(BAD, GOOD)[label][number % 3]}"
        rows.append(json.dumps({"text": text, "label": label, "who": f"secret name {who}"}))
    for name, part in (("train", rows), ("dev", rows[:40])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    return folder


@pytest.fixture(scope="module")
def persons(texts: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    data = str(mail(tmp_path_factory.mktemp("mail") / "data"))
    return replace(texts, task="text", data=data, unit_column="who", max_records_per_unit=3, batch_size=12, epochs=2)


@pytest.fixture(scope="module")
def done(persons: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "persons"
    run(persons, folder)
    return folder


def test_the_privacy_statement_is_about_persons(done: Path, persons: RunConfig) -> None:
    statement = strict(done / "privacy.json")
    assert statement["neighbouring_relation"] == "add or remove one person: all records of one id"
    assert statement["records"] == RECORDS and statement["units"] == PERSONS
    assert statement["sample_rate"] == 12 / PERSONS and statement["expected_batch_size"] == 12
    assert (
        "each person enters each step independently" in statement["sampling"] and "3 of them" in statement["sampling"]
    )
    by_hand = create_accountant("rdp")
    for _ in range(2 * PERSONS // 12):
        by_hand.step(noise_multiplier=0.5, sample_rate=12 / PERSONS)
    assert statement["epsilon"] == by_hand.get_epsilon(1e-3) and statement["steps"] == 10
    words = statement["statement"]
    for part in (
        f"{RECORDS} records of {PERSONS} persons",
        "One person is all records with one id",
        "adding all of them",
        "with the person in the data",
        "about 12 persons",
        "limiting each person's contribution",
        "The number of persons",
    ):
        assert part in words, part
    assert "training example" not in words
    public = " ".join(statement["public_by_assumption"])
    assert f"number of training persons, {PERSONS}:" in public and f"together, {RECORDS}:" in public
    caveats = " ".join(statement["caveats"])
    assert "several rows" not in caveats and "several ids" in caveats


def test_no_name_of_a_person_is_written_anywhere(done: Path) -> None:
    for path in done.rglob("*"):
        assert path.is_dir() or b"secret name" not in path.read_bytes(), path


def test_the_recipe_counts_persons(persons: RunConfig) -> None:
    class Notes(Listener):
        def note(self, text: str) -> None:
            heard.append(text)

    heard: list[str] = []
    given = {"task": "text", "data": persons.data, "model": persons.model, "unit_column": "who", "epsilon": 3.0}
    choose_settings(given | {"device": "cpu", "max_length": persons.max_length}, "options", Notes())
    assert heard[-1].startswith(f"recipe for {PERSONS} persons at ε = 3") and "steps on all persons" in heard[-1]


def test_the_report_speaks_of_persons(done: Path) -> None:
    page = render(find_runs([done]), "runs")
    assert f"{RECORDS} records of {PERSONS} persons" in page and "one person: all records of one id" in page


def test_a_resumed_run_is_the_same_unless_persons_are_others(persons: RunConfig, done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(CrashError):
        run(persons, folder, listener=CrashAt(step=7), checkpoint_every=3)
    data = Path(persons.data or "") / "train.jsonl"
    written = data.read_text()
    try:
        data.write_text(written.replace('"secret name 1"', '"secret name 2"'))  # the same records, one person fewer
        with pytest.raises(ConfigurationError, match=r"the saved run has (records|unit_of)="):
            _without_cache(persons, folder)
        names = [f'"secret name {number}"' for number in (3, 4)]
        data.write_text(written.replace(names[0], '"x"').replace(names[1], names[0]).replace('"x"', names[1]))
        _without_cache(persons, tmp_path / "renamed")  # other names of the same groups, another place: no error
        data.write_text(written.replace('"secret name 1"', '"x"', 1).replace('"secret name 2"', '"secret name 1"', 1))
        with pytest.raises(ConfigurationError, match=r"the saved run has (records|unit_of)="):
            _without_cache(persons, folder)
    finally:
        data.write_text(written)
    _without_cache(persons, folder)
    same(folder, done)


def _without_cache(config: RunConfig, folder: Path) -> None:
    from lsg.train.prepare_data import _CACHE

    _CACHE.clear()
    run(config, folder, resume=True)
    _CACHE.clear()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": PERSONS + 1}, f"--batch-size 61 is more than the {PERSONS} training persons"),
        ({"delta": 1 / PERSONS}, r"must be below 1/N .* \(N = 60 training persons\): .* all records of a person"),
        ({"unit_column": None}, "--max-records-per-unit 3 needs --unit-column"),
        ({"unit_column": "sender"}, "no column 'sender'; it has 'text', 'label', 'who'"),
        ({"max_records_per_unit": 0}, "--max-records-per-unit 0 must be at least 1"),
        ({"max_physical_batch_size": 2}, "max_records_per_unit=2 or less"),
        (
            {"task": "digits", "data": None, "model": "small-cnn"},
            "--unit-column are for --task text, tokens and generate alone",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    settings: dict[str, Any], message: str, persons: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(replace(persons, **settings), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_so_many_records_of_a_person_enter_a_step(persons: RunConfig, tmp_path: Path) -> None:
    """Without --max-records-per-unit, the default; a person of nine is then cut down to eight."""

    class Start(Listener):
        start: RunStart

        def started(self, start: RunStart) -> None:
            self.start = start

    listener = Start()
    run(replace(persons, max_records_per_unit=None, epochs=1), tmp_path / "run", listener=listener)
    assert listener.start.protected.most == 8 and listener.start.protected.counted == "200 records of 60 persons"
    assert listener.start.steps == 5 and listener.start.batch_size == 12
    assert " 8 of them" in strict(tmp_path / "run" / "privacy.json")["sampling"]


def test_non_private_training_draws_records_and_splits_by_person(persons: RunConfig, tmp_path: Path) -> None:
    config = replace(persons, method="non-private", noise_multiplier=None, validation=0.3, epochs=1)
    result = run(config, tmp_path / "run")
    assert result.privacy["units"] == result.privacy["records"] < RECORDS
    assert "person's id" in result.privacy["trained_part"]


def test_the_command_says_how_many_persons(persons: RunConfig, tmp_path: Path) -> None:
    options = [f"--{key.replace('_', '-')}={value}" for key, value in persons.to_dict().items()]
    options = [one for one in options if not one.startswith(("--compile", "--cuda-graphs"))]
    result = CliRunner().invoke(app, ["train", *options, "--output", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "200 records of 60 persons for training" in result.output
    assert "200 records of 60 persons, 10 steps of about 12" in result.output
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    assert "--unit-column" in shown and "8 without it" in " ".join(shown.split())


def test_the_score_of_persons_held_out_of_one_file_is_in_no_statement(persons: RunConfig, tmp_path: Path) -> None:
    assert persons.data is not None
    file = Path(persons.data) / "train.jsonl"
    result = run(replace(persons, data=str(file), lr=1e-9, epochs=1), tmp_path / "run")
    assert list(result.scores) == ["held-out"] and "not clearly better" in result.warnings[0]
    assert strict(tmp_path / "run" / "privacy.json")["warnings"] == []
