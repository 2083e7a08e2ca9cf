"""`--task tokens`: lists of words with tags, from every format that holds lists; what is wrong is one line."""

from pathlib import Path
from typing import Any

import pytest

from lsg.errors import ConfigurationError
from lsg.tasks.catalog import load_task
from lsg.tasks.data import Tagged, TaskData
from lsg.tasks.split import divide
from tests.support.tagged import tagged, write_rows

ROWS = [
    {**row, "tokens": [*row["tokens"], str(n)], "ner_tags": [*row["ner_tags"], "O"]} for n, row in enumerate(tagged(60))
]


def train(data: TaskData) -> Tagged:
    assert isinstance(data.train, Tagged)
    return data.train


def load(path: Path | str, **columns: str) -> TaskData:
    return load_task("tokens", str(path), **columns)


def refusal(path: Path | None, **columns: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_task("tokens", None if path is None else str(path), **columns)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_formats_with_lists_hold_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=7)
    wanted = load(write_rows(tmp_path / "a.jsonl", ROWS), unit_column="who")
    found = load(tmp_path / "a.parquet", unit_column="who")
    assert wanted.label_names == found.label_names == ("BAD", "GOOD", "O")
    assert train(wanted) == train(found) and wanted.evaluation == found.evaluation
    assert wanted.columns == "words of the column 'tokens' with tags of 'ner_tags'"


def test_a_file_is_divided_by_each_records_words_and_a_folder_is_not(tmp_path: Path) -> None:
    data = load(write_rows(tmp_path / "all.jsonl", ROWS))
    assert set(data.evaluation) == {"held-out"} and "record's own content" in data.used
    assert len(data.train) + len(data.evaluation["held-out"]) == len(ROWS)
    folder = tmp_path / "parts"
    folder.mkdir()
    write_rows(folder / "train.jsonl", ROWS)
    write_rows(folder / "dev.jsonl", ROWS[:5])
    parts = load(folder)
    whole = train(parts)
    assert list(whole.words) == [row["tokens"] for row in ROWS] and len(parts.evaluation["dev"]) == 5
    assert [[parts.label_names[tag] for tag in tags] for tags in whole.tags] == [row["ner_tags"] for row in ROWS]
    # One record more moves no other; its tags are no part of its content, and where a word ends is.
    chosen, _ = divide(whole, 0.3, "test")
    fewer, _ = divide(whole.take(range(1, 60)), 0.3, "test")
    assert isinstance(chosen, Tagged) and isinstance(fewer, Tagged)
    assert list(chosen.words)[-len(fewer) :] == list(fewer.words)
    write_rows(folder / "train.jsonl", [{**row, "ner_tags": row["ner_tags"][::-1]} for row in ROWS])
    other, _ = divide(load(folder).train, 0.3, "test")
    assert isinstance(other, Tagged) and other.words == chosen.words
    joined = [{"tokens": [" ".join(row["tokens"]), ""], "ner_tags": ["O", "B"]} for row in ROWS]
    write_rows(folder / "dev.jsonl", joined[:5])
    write_rows(folder / "train.jsonl", joined)
    assert [len(words) for words in train(load(folder)).words] == [2] * 60
    assert {words[0] for words in train(load(folder)).words} != {" ".join(words) for words in chosen.words}


def test_persons_are_on_one_side(tmp_path: Path) -> None:
    data = load(write_rows(tmp_path / "all.jsonl", ROWS), unit_column="who")
    (held,) = data.evaluation.values()
    assert isinstance(held, Tagged) and held.persons and train(data).persons
    assert not set(train(data).persons or ()) & set(held.persons) and "person's id" in data.used


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (("tokens", "tags"), {}),
        (("Words", "NER_tags"), {}),
        (("words", "labels"), {}),
        (("pieces", "pos"), {"text_column": "pieces", "label_column": "pos"}),
    ],
)
def test_columns_are_guessed_or_named(names: tuple[str, str], named: dict[str, str], tmp_path: Path) -> None:
    rows = [{"id": 1, names[0]: ["a", "b"], names[1]: [10, 9.0]}]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "dev.jsonl", rows)
    found = load(tmp_path, **named)
    assert list(train(found).words) == [["a", "b"]] and list(train(found).tags) == [[1, 0]]
    assert found.label_names == ("9", "10")


FINE = {"tokens": ["a", "b"], "tags": ["O", "B"]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"tokens": ["a"], "tags": ["O", "B"]},
            "line 2: 1 words in 'tokens' and 2 tags in 'tags', where each word has",
        ),
        ({"tokens": [], "tags": []}, "line 2: 'tokens' is an empty list"),
        ({"tokens": None, "tags": ["O"]}, "line 2: 'tokens' is empty"),
        ({"tokens": "a b", "tags": ["O", "B"]}, "line 2: 'tokens' is 'a b', not a list"),
        ({"tokens": ["a", "b"], "tags": 7}, "line 2: 'tags' is 7, not a list"),
        ({"tokens": ["a", "b"], "tags": {"O": 1}}, "line 2: 'tags' is {'O': 1}, not a list"),
        ({"tokens": ["a", 3], "tags": ["O", "B"]}, "line 2: the word 3 is not a text"),
        ({"tokens": ["a", None], "tags": ["O", "B"]}, "line 2: the word None is not a text"),
        ({"tokens": ["a", ["b"]], "tags": ["O", "B"]}, "line 2: the word ['b'] is not a text"),
        ({"tokens": ["a", "\ud800"], "tags": ["O", "B"]}, "line 2: a word holds half a character"),
        ({"tokens": ["a", "b"], "tags": ["O", None]}, "line 2: 'tags' holds an empty one"),
        ({"tokens": ["a", "b"], "tags": ["O", " "]}, "line 2: 'tags' holds an empty one"),
        ({"tokens": ["a", "b"], "tags": ["O", 0.5]}, "line 2: label 0.5 is neither an integer nor a word"),
        ({"tokens": ["a", "b"], "tags": ["O", ["B"]]}, "line 2: label ['B'] is neither an integer nor a word"),
        ({"tokens": ["a", "b"]}, "line 2: no 'tags'; it has 'tokens'"),
    ],
)
def test_what_is_wrong_with_a_record_is_one_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [FINE, row, FINE])
    assert f"{path}, {message}" in refusal(path)


def test_what_is_wrong_with_the_data_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert "--task tokens needs --data: a JSONL or Parquet file" in refusal(None)
    write_rows(path, [{"text": "x", "tags": ["y"]}])
    assert "no column looks like lists of words; name one with --text-column; it has 'text', 'tags'" in refusal(path)
    write_rows(path, [{"words": ["x"], "who": 1}])
    assert "no column looks like lists of tags; name one with --label-column; it has" in refusal(path)
    assert "'who' is named twice, for words, tags and person" in refusal(path, label_column="who", unit_column="who")
    assert "--pair-column y: --task tokens has no such column" in refusal(path, pair_column="y")
    assert "--prompt-column y: --task tokens has no such column" in refusal(path, prompt_column="y")
    write_rows(path, [{"words": ["x"], "tags": ["O"]}] * 30)
    assert "column 'tags' holds 1 different labels in 30 rows" in refusal(path)
    write_rows(path, [{"words": ["x", "y"], "tags": ["O", "B"]}] * 3)
    assert "3 records, too few" in refusal(path)
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        (tmp_path / name).write_text(f"tokens{separator}tags\na{separator}O\n")
        assert f"{tmp_path / name}: its fields hold no lists of words and tags" in refusal(tmp_path / name)
    folder = tmp_path / "parts"
    folder.mkdir()
    write_rows(folder / "train.jsonl", [FINE])
    write_rows(folder / "dev.jsonl", [FINE, {"tokens": ["a"], "tags": ["C"]}])
    assert f"{folder / 'dev.jsonl'}, line 2: label 'C' is not one of B, O" in refusal(folder)
    write_rows(folder / "dev.jsonl", [FINE, {"tokens": ["a"], "tags": []}])
    assert "line 2: 1 words in 'tokens' and 0 tags" in refusal(folder)


def test_a_parquet_file_without_lists_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(Table.from_pylist([{"tokens": "a", "tags": "O"}]), path)
    assert "row 1: 'tokens' is 'a', not a list" in refusal(path)
    parquet.write_table(Table.from_pylist([{"tokens": ["a"], "tags": ["O"]}, {"tokens": None, "tags": None}]), path)
    assert "row 2: 'tokens' is empty" in refusal(path)


def test_a_hub_data_sets_classes_are_given_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    from lsg.tasks.readers import parts

    names = ["O", "B-PER", "I-PER"]
    features = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            "ner_tags": datasets.Sequence(datasets.ClassLabel(names=names)),
        }
    )
    rows = [{"tokens": ["so", "Ada", "Lovelace"], "ner_tags": [0, 1, 2]}, {"tokens": ["yes"], "ner_tags": [0]}]
    split = datasets.Dataset.from_list(rows, features=features)
    monkeypatch.setattr(parts, "load_hub", lambda name: {"train": split, "test": split})
    found = load("somebody/names")
    assert found.label_names == ("B-PER", "I-PER", "O") and list(found.evaluation) == ["test"]
    assert list(train(found).tags) == [[2, 0, 1], [2]] and train(found).words[0] == ["so", "Ada", "Lovelace"]
