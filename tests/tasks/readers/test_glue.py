"""GLUE's TSV folders: each task in its real layout, and each way in which a file can be broken."""

import time
from pathlib import Path

import pytest

from lsg.tasks.catalog import load_task
from lsg.tasks.data import TaskData, Texts
from tests.support.refusals import refusal

PARSES = [f"sentence{i}_{kind}" for kind in ("binary_parse", "parse") for i in (1, 2)]
MNLI_COLUMNS = ["index", "promptID", "pairID", "genre", *PARSES, "sentence1", "sentence2"]


def tsv(path: Path, header: list[str], rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join("\t".join(row) for row in [header, *rows]) + "\n", encoding="utf-8", newline="")


def sst2(folder: Path, train: str = "sentence\tlabel\ngood \t1\nbad \t0\n") -> Path:
    (folder / "train.tsv").write_bytes(train.encode())
    (folder / "dev.tsv").write_text("sentence\tlabel\nfine \t1\n")
    return folder


def parts(data: TaskData) -> dict[str, Texts]:
    records = {"train": data.train, **data.evaluation}
    assert all(isinstance(part, Texts) for part in records.values())
    return records  # type: ignore[return-value]


def test_sst2(tmp_path):
    data = load_task("sst2", str(sst2(tmp_path)))
    assert parts(data)["train"].texts == ["good ", "bad "] and parts(data)["train"].pairs is None
    assert data.train.labels.tolist() == [1, 0] and data.label_names == ("negative", "positive")
    assert list(data.evaluation) == ["dev"] and data.source == str(tmp_path)


def test_the_folder_above_will_do(tmp_path):
    (tmp_path / "SST-2").mkdir()
    sst2(tmp_path / "SST-2")
    assert load_task("sst2", str(tmp_path)).source == str(tmp_path / "SST-2")


def test_qnli_quotes_are_plain_characters(tmp_path):
    header = ["index", "question", "sentence", "label"]
    rows = [["0", '"Who', 'the "first', "not_entailment"], ["1", "What?", "a\u2028b\x85c", "entailment"]]
    tsv(tmp_path / "train.tsv", header, rows)
    tsv(tmp_path / "dev.tsv", header, rows[:1])
    data = load_task("qnli", str(tmp_path))
    assert parts(data)["train"].texts == ['"Who', "What?"]
    assert parts(data)["train"].pairs == ['the "first', "a\u2028b\x85c"]
    assert data.train.labels.tolist() == [1, 0] and data.label_names == ("entailment", "not_entailment")


def test_qqp_and_its_empty_second_questions(tmp_path):
    header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    tsv(tmp_path / "train.tsv", header, [["1", "2", "3", "a?", "b?", "1"], ["4", "5", "6", "c?", "", "0"]])
    tsv(tmp_path / "dev.tsv", header, [["7", "8", "9", "d?", "e?", "0"]])
    data = load_task("qqp", str(tmp_path))
    assert parts(data)["train"].pairs == ["b?", ""] and data.train.labels.tolist() == [1, 0]
    assert data.label_names == ("not_duplicate", "duplicate")
    tsv(tmp_path / "dev.tsv", header, [["7", "8", "9", "", "e?", "0"]])
    assert f"{tmp_path / 'dev.tsv'}, line 2: 'question1' is empty" in refusal("qqp", tmp_path)


def test_mnli_has_two_evaluation_parts_with_other_columns_than_training(tmp_path):
    filler = ["x"] * 8
    tsv(
        tmp_path / "train.tsv",
        [*MNLI_COLUMNS, "label1", "gold_label"],
        [[*filler, "p1", "h1", "neutral", "contradiction"], [*filler, "p2", "n/a", "neutral", "entailment"]],
    )
    for part, label in (("dev_matched", "neutral"), ("dev_mismatched", "entailment")):
        header = [*MNLI_COLUMNS, "label1", "label2", "label3", "label4", "label5", "gold_label"]
        tsv(tmp_path / f"{part}.tsv", header, [[*filler, part, "h", *["neutral"] * 5, label]])
    data = load_task("mnli", str(tmp_path))
    assert parts(data)["train"].texts == ["p1", "p2"] and parts(data)["train"].pairs == ["h1", "n/a"]
    assert data.train.labels.tolist() == [2, 0] and data.label_names == ("entailment", "neutral", "contradiction")
    assert {part: records.texts for part, records in parts(data).items() if part != "train"} == {
        "dev_matched": ["dev_matched"],
        "dev_mismatched": ["dev_mismatched"],
    }
    assert data.evaluation["dev_matched"].labels.tolist() == [1]
    (tmp_path / "dev_mismatched.tsv").unlink()
    assert str(tmp_path / "dev_mismatched.tsv") in refusal("mnli", tmp_path)


def test_windows_line_ends_and_a_byte_order_mark(tmp_path):
    data = load_task("sst2", str(sst2(tmp_path, "\ufeffsentence\tlabel\r\ngood\t1\r\nbad\t0\r\n\r\n")))
    assert parts(data)["train"].texts == ["good", "bad"] and data.train.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("content", "where", "what"),
    [
        ("sentence\tlabel\ngood\t1\nbad", ", line 3", "1 fields, where the header has 2"),
        ("sentence\tlabel\ngood\t1\nb\tad\t0\n", ", line 3", "3 fields"),
        ("sentence\tlabel\ngood\t1\n\nbad\t0\n", ", line 3", "1 fields"),
        ("sentence\tlabel\ngood\t1\nbad\t2\n", ", line 3", "label '2' is not one of 0, 1"),
        ("sentence\tlabel\ngood\t1\nbad\t\n", ", line 3", "'label' is empty"),
        ("sentence\tlabel\ngood\t1\n  \t0\n", ", line 3", "'sentence' is empty"),
        ("text\tlabel\ngood\t1\n", "", "no column 'sentence'; it has 'text', 'label'"),
        ("sentence\tlabel\tlabel\ngood\t1\t1\n", ", line 1", "'label' twice"),
        ("sentence\tlabel\n", "", "no rows"),
        ("", "", "is empty"),
        ("\n\n", "", "blank lines only"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, content, where, what):
    message = refusal("sst2", sst2(tmp_path, content))
    assert message.startswith(f"{tmp_path / 'train.tsv'}{where}: ") and what in message


def test_undecodable_bytes_are_named_with_their_line(tmp_path):
    (sst2(tmp_path) / "dev.tsv").write_bytes(b"sentence\tlabel\ngood\t1\nb\xe9d\t0\n")
    assert refusal("sst2", tmp_path) == f"{tmp_path / 'dev.tsv'}, line 3: byte 0xe9 is not UTF-8 text"


def test_a_missing_file_is_named(tmp_path):
    (sst2(tmp_path) / "train.tsv").unlink()
    assert refusal("sst2", tmp_path).startswith(f"{tmp_path / 'train.tsv'}: no such file")


def test_a_large_file_is_read_fast(tmp_path):
    """SST-2's 67,349 rows take 0.1 s; the bound leaves room for a busy machine."""
    rows = "".join(f"a sentence of about nine words , as there {i} \t{i % 2}\n" for i in range(67_349))
    folder = sst2(tmp_path, "sentence\tlabel\n" + rows)
    start = time.perf_counter()
    assert len(load_task("sst2", str(folder)).train) == 67_349
    assert time.perf_counter() - start < 2
