"""Ids of persons: a column of them in every format, splits by person, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from lsg.tasks.catalog import load_task
from lsg.tasks.data import TaskData, Texts
from lsg.tasks.split import divide
from tests.support.refusals import refusal
from tests.tasks.readers.test_text import write

ROWS = [{"text": f"text {i}", "label": "ab"[i % 2], "who": f"person {i * 7 % 61}"} for i in range(200)]
PERSON_OF = {row["text"]: row["who"] for row in ROWS}


def persons(data: TaskData, part: str = "train") -> list[str]:
    records = data.train if part == "train" else data.evaluation[part]
    assert isinstance(records, Texts) and records.persons is not None
    assert [PERSON_OF.get(text, person) for text, person in zip(records.texts, records.persons, strict=True)] == (
        records.persons
    )
    return records.persons


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl", ".parquet"])
def test_all_records_of_a_person_fall_on_one_side(tmp_path: Path, suffix: str) -> None:
    data = load_task("text", str(write(tmp_path / f"mail{suffix}", ROWS)), unit_column="who")
    trained, held_out = persons(data), persons(data, "held-out")
    assert len(trained) + len(held_out) == 200 and not {*trained} & {*held_out}
    assert len(trained) > len({*trained}) > 10 and held_out
    assert data.used.endswith("chosen by a hash of each person's id")


def test_one_person_more_moves_no_other(tmp_path: Path) -> None:
    new = [{"text": f"new {i}", "label": "a", "who": "newcomer"} for i in range(7)]
    path = tmp_path / "mail.jsonl"
    fewer = load_task("text", str(write(path, ROWS)), unit_column="who")
    more = load_task("text", str(write(path, [*new[:3], *ROWS[::-1], *new[3:]])), unit_column="who")
    for part in ("train", "held-out"):
        assert {*persons(fewer, part)} ^ {*persons(more, part)} <= {"newcomer"}
        kept = [person for person in persons(more, part) if person != "newcomer"]
        assert sorted(kept) == sorted(persons(fewer, part))
    for share, use in ((0.3, "validation"), (0.5, "train-limit")):
        sides = []
        for data in (fewer, more):
            inside, outside = divide(data.train, share, use)
            assert isinstance(inside, Texts) and isinstance(outside, Texts)
            assert not {*(inside.persons or ())} & {*(outside.persons or ())}
            sides.append({*(inside.persons or ())} - {"newcomer"})
        assert sides[0] == sides[1] and sides[0]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_number_is_the_same_person_however_it_is_written(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": f"t {i}", "label": "ab"[i % 2], "who": i % 20} for i in range(100)]
    as_floats: list[dict[str, Any]] = [row | {"who": float(row["who"])} for row in rows]  # type: ignore[arg-type]
    found = []
    for some in (rows, as_floats):
        data = load_task("text", str(write(tmp_path / f"a{suffix}", some)), unit_column="who").train
        assert isinstance(data, Texts) and data.persons is not None
        found.append(data.persons)
    assert found[0] == found[1] and {*found[0]} < {str(i) for i in range(20)}


def test_spaces_around_an_id_make_no_other_person(tmp_path: Path) -> None:
    rows = [row | {"who": f" {row['who']} " if i % 3 else row["who"]} for i, row in enumerate(ROWS)]
    path = tmp_path / "a.csv"
    plain = load_task("text", str(write(path, ROWS)), unit_column="who")
    assert persons(load_task("text", str(write(path, rows)), unit_column="who")) == persons(plain)


def test_the_evaluation_part_needs_no_persons(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", ROWS)
    write(tmp_path / "dev.csv", [{"text": "t", "label": "a"}, {"text": "u", "label": "b"}])
    data = load_task("text", str(tmp_path), unit_column="who")
    assert len(persons(data)) == 200 and data.used == ""


@pytest.mark.parametrize(("suffix", "place"), [(".tsv", "line 5"), (".csv", "line 5"), (".jsonl", "line 4")])
def test_a_row_without_an_id_is_named(tmp_path: Path, suffix: str, place: str) -> None:
    rows: list[dict[str, Any]] = [dict(row) for row in ROWS]
    for empty in ("", "   "):
        rows[3]["who"] = empty
        path = write(tmp_path / f"mail{suffix}", rows)
        assert refusal("text", path, unit_column="who") == f"{path}, {place}: 'who' is empty"
    if suffix == ".jsonl":
        for value, words in ((None, "'who' is empty"), ([1], "the id [1] is neither an integer nor a word")):
            rows[3]["who"] = value
            assert words in refusal("text", write(path, rows), unit_column="who")
        del rows[3]["who"]
        assert "line 4: no 'who'" in refusal("text", write(path, rows), unit_column="who")


def test_too_few_persons_for_two_parts_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "mail.csv", [row | {"who": i % 2} for i, row in enumerate(ROWS)])
    assert "200 records of 2 persons, too few" in refusal("text", path, unit_column="who")


def test_columns_that_cannot_be_persons_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "mail.csv", ROWS)
    assert "no column 'sender'; it has 'text', 'label', 'who'" in refusal("text", path, unit_column="sender")
    assert "column 'label' is named twice" in refusal("text", path, unit_column="label", label_column="label")
    # A column that persons are named by is not guessed for anything else.
    assert "no column looks like a label" in refusal("text", path, unit_column="label")
    for task in ("sst2", "digits", "images", "cifar10"):
        assert "--unit-column are for --task text, tokens and generate alone" in refusal(task, None, unit_column="who")
