"""`--task generate`: texts, and prompts with completions, from every format; what is wrong is one line."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lsg.errors import ConfigurationError
from lsg.tasks.catalog import load_task
from lsg.tasks.data import Documents
from lsg.tasks.readers import files
from lsg.tasks.split import divide

ROWS = [{"prompt": f"question {n}", "completion": f"answer, {n}\nmore", "who": f"somebody {n % 31}"} for n in range(60)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def train(path: Path, **columns: str) -> Documents:
    found = load_task("generate", str(path), **columns).train
    assert isinstance(found, Documents)
    return found


def refusal(path: Path | None, **columns: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_task("generate", None if path is None else str(path), **columns)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_all_formats_hold_the_same_documents(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    parquet.write_table(Table.from_pylist(ROWS), tmp_path / "a.parquet")
    wanted = train(jsonl(tmp_path / "a.jsonl", ROWS), unit_column="who")
    assert wanted.prompts is not None and wanted.prompts[0].startswith("question")
    for name in ("a.csv", "a.parquet"):
        assert train(tmp_path / name, unit_column="who") == wanted


def test_a_file_is_divided_by_each_records_content_and_a_folder_is_not(tmp_path: Path) -> None:
    data = load_task("generate", str(jsonl(tmp_path / "all.jsonl", ROWS)))
    assert set(data.evaluation) == {"held-out"} and data.label_names == ()
    assert len(data.train) + len(data.evaluation["held-out"]) == len(ROWS) and "record's own content" in data.used
    folder = tmp_path / "parts"
    folder.mkdir()
    jsonl(folder / "train.jsonl", ROWS)
    jsonl(folder / "dev.jsonl", ROWS[:5])
    parts = load_task("generate", str(folder))
    assert len(parts.train) == 60 and len(parts.evaluation["dev"]) == 5
    # One record more moves no other, and the prompt is part of a record's content.
    whole = parts.train
    chosen, _ = divide(whole, 0.3, "test")
    fewer, _ = divide(whole.take(range(1, 60)), 0.3, "test")
    assert list(chosen.texts)[-len(fewer) :] == list(fewer.texts)
    assert isinstance(whole, Documents) and whole.prompts is not None
    other = Documents(list(whole.texts), ["x" + prompt for prompt in whole.prompts])
    assert list(divide(other, 0.3, "test")[0].texts) != list(chosen.texts)


def test_persons_are_on_one_side(tmp_path: Path) -> None:
    data = load_task("generate", str(jsonl(tmp_path / "all.jsonl", ROWS)), unit_column="who")
    assert isinstance(data.train, Documents) and data.train.persons is not None
    held = data.evaluation["held-out"]
    assert isinstance(held, Documents) and held.persons is not None
    assert not set(data.train.persons) & set(held.persons) and "person's id" in data.used


@pytest.mark.parametrize(
    ("row", "named", "text", "prompt"),
    [
        ({"text": "t", "label": 1}, {}, "t", None),
        ({"subject": "s", "body": "b"}, {}, "b", None),
        ({"Instruction": "i", "output": "o", "input": ""}, {}, "o", "i"),
        ({"question": "q", "answer": "a"}, {}, "a", "q"),
        ({"prompt": "p", "text": "t"}, {"text_column": "text"}, "t", None),  # a text that is named alone has no prompt
        ({"before": "p", "completion": "c"}, {"prompt_column": "before"}, "c", "p"),
        ({"a": "p", "b": "c"}, {"prompt_column": "a", "text_column": "b"}, "c", "p"),
        ({"prompt": "", "completion": "c"}, {}, "c", ""),
    ],
)
def test_columns_are_guessed_or_named(
    row: dict[str, Any], named: dict[str, str], text: str, prompt: str | None, tmp_path: Path
) -> None:
    jsonl(tmp_path / "train.jsonl", [row])
    jsonl(tmp_path / "dev.jsonl", [row])
    found = train(tmp_path, **named)
    assert list(found.texts) == [text]
    assert (found.prompts is None) == (prompt is None) and list(found.prompts or [prompt]) == [prompt]


def test_what_is_wrong_with_the_data_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    assert "--task generate needs --data" in refusal(None)
    assert "no such file" in refusal(path)
    jsonl(path, [{"subject": "x", "sender": "y"}])
    assert "no column looks like a text; name one with --text-column; it has 'subject', 'sender'" in refusal(path)
    assert "no column 'text'" in refusal(path, text_column="text")
    assert "'sender' is named twice, for prompt, text and person" in refusal(
        path, text_column="sender", prompt_column="sender"
    )
    assert "--label-column y: --task generate has no such column" in refusal(path, label_column="y")
    assert "--pair-column y: --task generate has no such column" in refusal(path, pair_column="y")
    jsonl(path, [{"text": "fine"}, {"text": " \n "}])
    assert f"{path}, line 2: 'text' is empty" in refusal(path)
    jsonl(path, [{"text": "fine"}, {"text": 3}])
    assert "line 2: 'text' is 3, not a text" in refusal(path)
    jsonl(path, [{"text": "fine"}] * 3)
    assert "3 records, too few" in refusal(path)
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    jsonl(path, [{"text": "fine"}, {"text": "x" * 2000}])
    assert "line 2: longer than 1,000 characters" in refusal(path)
    with pytest.raises(ConfigurationError, match="--prompt-column p: --task text has no such column"):
        load_task("text", str(path), prompt_column="p")
    with pytest.raises(ConfigurationError, match=r"--prompt-column, .* are for --task text, tokens and generate alone"):
        load_task("digits", prompt_column="p")


def test_a_hub_data_set_is_read_without_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    from lsg.tasks.readers import parts

    splits = {"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:9])}
    monkeypatch.setattr(parts, "load_hub", lambda name: splits)
    found = load_task("generate", "somebody/answers", unit_column="who")
    assert len(found.train) == 60 and len(found.evaluation["validation"]) == 9
    assert isinstance(found.train, Documents) and found.train.persons is not None
    assert found.train.persons[32] == "somebody 1"
