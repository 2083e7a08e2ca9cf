"""Anyone's texts: formats, guessed and named columns, the held-out tenth, and what is refused."""

import json
import sys
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet

from lsg.tasks.catalog import load_task
from lsg.tasks.data import Texts
from tests.support.refusals import refusal

ROWS = [{"text": f"text {i}", "label": ("ham", "spam")[i % 2]} for i in range(40)]


def write(path: Path, rows: list[dict]) -> Path:
    names = list(rows[0])
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        separator = {".tsv": "\t", ".csv": ","}[path.suffix]
        lines = [separator.join(names), *(separator.join(str(row[name]) for name in names) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    return path


def train_texts(data) -> Texts:
    assert isinstance(data.train, Texts)
    return data.train


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl", ".parquet"])
def test_one_file_keeps_the_same_tenth_for_evaluation(tmp_path, suffix):
    path = write(tmp_path / f"mail{suffix}", ROWS)
    data, again = (load_task("text", str(path)) for _ in range(2))
    evaluation = data.evaluation["held-out"]
    assert isinstance(evaluation, Texts)
    assert 0 < len(evaluation) < 10
    assert sorted(train_texts(data).texts + evaluation.texts) == sorted(row["text"] for row in ROWS)
    assert train_texts(data).texts == train_texts(again).texts
    assert data.label_names == ("ham", "spam") and data.source == str(path)
    for part in (train_texts(data), evaluation):
        assert part.labels.tolist() == [int(text.split()[1]) % 2 for text in part.texts]


def test_a_folder_of_parts_in_different_formats(tmp_path):
    write(tmp_path / "train.csv", ROWS)
    write(tmp_path / "validation.jsonl", ROWS[:3])
    (tmp_path / "test.tsv").write_text("text\nno labels here\n")
    data = load_task("text", str(tmp_path))
    assert len(data.train) == 40 and list(data.evaluation) == ["validation"]
    assert data.evaluation["validation"].labels.tolist() == [0, 1, 0]


def test_numbers_as_labels_are_sorted_as_numbers(tmp_path):
    rows = [{"text": "t", "label": label} for label in (10, 2, -1, 2)]
    for suffix in (".tsv", ".jsonl", ".parquet"):
        write(tmp_path / f"train{suffix}", rows)
        write(tmp_path / f"dev{suffix}", rows)
        data = load_task("text", str(tmp_path))
        assert data.label_names == ("-1", "2", "10") and data.train.labels.tolist() == [2, 1, 0, 1]
        assert data.train.labels.dtype == torch.int64
        for part in ("train", "dev"):
            (tmp_path / f"{part}{suffix}").unlink()


def test_labels_that_json_and_parquet_can_hold(tmp_path):
    rows = [{"text": f"t {number}", "label": number % 2 == 0} for number in range(40)]
    data = load_task("text", str(write(tmp_path / "a.jsonl", rows)))
    assert data.label_names == ("false", "true")
    rows = [{"text": f"t {number}", "label": float(number % 2)} for number in range(40)]
    assert load_task("text", str(write(tmp_path / "a.parquet", rows))).label_names == ("0", "1")


def test_csv_quoting_lets_a_text_span_lines(tmp_path):
    (tmp_path / "train.csv").write_text('text,label\n"a, ""b""\nc",0\nd,1\n"e\n\nf",oops\n')
    (tmp_path / "dev.csv").write_text('text,label\n"x,\ny",0\nz,2\n')
    assert ", line 4: label '2' is not one of 0, 1, oops" in refusal("text", tmp_path)
    (tmp_path / "dev.csv").write_text('text,label\n"x,\ny",0\n')
    assert train_texts(load_task("text", str(tmp_path))).texts == ['a, "b"\nc', "d", "e\n\nf"]
    (tmp_path / "dev.csv").write_text('text,label\nx,0\n"never closed,0\ny,0\n')
    assert f"{tmp_path / 'dev.csv'}, line 3: not valid CSV" in refusal("text", tmp_path)


@pytest.mark.parametrize(
    ("names", "text", "pair"),
    [
        (("Sentence1", "Sentence2", "Label"), "Sentence1", "Sentence2"),
        (("premise", "hypothesis", "gold_label"), "premise", "hypothesis"),
        (("question", "sentence", "label"), "question", "sentence"),
        (("id", "review", "sentiment"), "review", None),
        (("question", "other", "label"), "question", None),
    ],
)
def test_columns_are_guessed(tmp_path, names, text, pair):
    rows = [{name: f"{name} {i}" for name in names} for i in range(3)]
    for part in ("train", "dev"):
        write(tmp_path / f"{part}.tsv", rows)
    data = train_texts(load_task("text", str(tmp_path)))
    assert data.texts[0] == f"{text} 0"
    assert data.pairs is None if pair is None else data.pairs is not None and data.pairs[0] == f"{pair} 0"


def test_columns_are_named(tmp_path):
    rows = [{"text": f"t{i}", "label": 1, "a": f"a{i}", "b": f"b{i}", "c": i} for i in range(5)]
    for part in ("train", "dev"):
        write(tmp_path / f"{part}.csv", rows)
    data = load_task("text", str(tmp_path), text_column="a", pair_column="b", label_column="c")
    assert train_texts(data).texts[0] == "a0" and train_texts(data).pairs == ["b0", "b1", "b2", "b3", "b4"]
    assert train_texts(load_task("text", str(tmp_path), pair_column="b", label_column="c")).texts[0] == "t0"
    assert train_texts(load_task("text", str(tmp_path), text_column="a", label_column="c")).pairs is None


def test_columns_that_are_not_there(tmp_path):
    path = write(tmp_path / "a.csv", [{"x": 1, "y": 2}, {"x": 1, "y": 3}])
    assert refusal("text", path, text_column="z") == f"{path}: no column 'z'; it has 'x', 'y'"
    message = refusal("text", path, label_column="y")
    assert str(path) in message and "--text-column" in message and "'x', 'y'" in message
    assert "--label-column" in refusal("text", path, text_column="x")
    assert "named twice" in refusal("text", path, text_column="x", label_column="x")


def test_evaluation_data_needs_the_same_columns_and_labels(tmp_path):
    write(tmp_path / "train.tsv", ROWS)
    dev = write(tmp_path / "dev.tsv", [{"text": "a", "label": "ham"}, {"text": "b", "label": "eggs"}])
    assert refusal("text", tmp_path) == f"{dev}, line 3: label 'eggs' is not one of ham, spam"
    write(dev, [{"sentence": "a", "label": "ham"}])
    assert refusal("text", tmp_path) == f"{dev}: no column 'text'; it has 'sentence', 'label'"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.jsonl", b'{"text": "a", "label": 0}\n{"text": "b"\n', ", line 2: not valid JSON"),
        ("a.jsonl", b'{"text": "a", "label": 0}\n\n{"text": "b", "label": 1}\n', ", line 2: not valid JSON"),
        ("a.jsonl", b"[1, 2]\n", ", line 1: not a JSON object"),
        ("a.jsonl", b'{"text": "a", "label": 0, "text": "b"}\n', ", line 1: not valid JSON ('text' is given twice)"),
        ("a.jsonl", b'{"text": "a", "label": 0, "x": [{"y": 1, "y": 2}]}\n', "('y' is given twice)"),
        ("a.jsonl", b'{"text": "a \\ud83d", "label": 0}\n', ", line 1: 'text' holds half a character"),
        ("a.jsonl", b'{"text": "a", "label": 0}\n{"text": "b"}\n', ", line 2: no 'label'; it has 'text'"),
        ("a.jsonl", b'{"text": "a", "label": 0}\n{"text": 7, "label": 1}\n', ", line 2: 'text' is 7, not a text"),
        ("a.jsonl", b'{"text": "a", "label": 0}\n{"text": null, "label": 1}\n', ", line 2: 'text' is empty"),
        ("a.jsonl", b'{"text": "a", "label": 0}\n{"text": "b", "label": null}\n', ", line 2: 'label' is empty"),
        ("a.jsonl", b'{"text": "a", "label": 0}\n{"text": "b", "label": [1]}\n', ", line 2: label [1] is neither"),
        ("a.jsonl", b'{"text": "a", "label": 0.5}\n', ", line 1: label 0.5 is neither"),
        ("a.csv", b"text,label\na,0\nb,1,2\n", ", line 3: 3 fields"),
        ("a.csv", b"text,label\na,0\nb,0\n", ": column 'label' holds 1 different labels in 2 rows"),
        ("a.csv", b"text,label\n" + b"".join(b"a,%d\n" % i for i in range(1001)), "holds 1,001 different labels"),
        ("a.parquet", b"PAR1 but not really PAR1", ": not a readable Parquet file"),
        ("a.xlsx", b"x", "'.xlsx' is not one of .tsv, .csv, .jsonl, .parquet"),
        ("a.pkl", b"\x80\x04K\x01.", "'.pkl' is not one of"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content)
    message = refusal("text", tmp_path / name)
    assert message.startswith(str(tmp_path / name)) and what in message


def test_parquet_rows_are_named(tmp_path):
    path = write(tmp_path / "a.parquet", [{"text": "a", "label": 0}, {"text": None, "label": 1}])
    assert refusal("text", path) == f"{path}, row 2: 'text' is empty"
    write(path, [{"text": "some text", "label": 0}, {"text": "more text", "label": 1}])
    path.write_bytes(path.read_bytes().replace(b"more text", b"more \xfeext"))
    assert str(path) in refusal("text", path)
    path.write_bytes(path.read_bytes()[:-20])
    assert str(path) in refusal("text", path)


def test_parquet_columns_of_one_name_are_refused(tmp_path):
    columns = [pyarrow.array(["a", "b"]), pyarrow.array([0, 1]), pyarrow.array(["c", "d"])]
    parquet.write_table(pyarrow.table(columns, names=["text", "label", "text"]), tmp_path / "a.parquet")
    assert refusal("text", tmp_path / "a.parquet").endswith("a.parquet: two columns are named 'text'")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refusal("text", path) == f"{path}: Parquet needs pyarrow: pip install 'pyarrow>=14.0.1'"


def test_a_folder_without_its_parts(tmp_path):
    assert f"{tmp_path}: no train file" in refusal("text", tmp_path)
    write(tmp_path / "train.tsv", ROWS)
    assert f"{tmp_path}: no dev file" in refusal("text", tmp_path)
    write(tmp_path / "train.csv", ROWS)
    assert "'train.csv', 'train.tsv'" in refusal("text", tmp_path)


def test_a_missing_file_is_not_looked_for_on_the_hub():
    assert refusal("text", "missing.csv") == "--data missing.csv: no such file"
