"""Reading large tables: in memory of at most twice the file, and with a word where it takes long."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lsg.tasks.packed import PackedTexts, TextColumn, WordColumn
from lsg.tasks.readers import progress
from lsg.tasks.readers.columns import WantedColumns
from lsg.tasks.readers.progress import Reading, told_to
from lsg.tasks.readers.tables import read_table

# In a process of its own: what was used before is part of the largest that it ever used.
MEASURE = """
import json, resource, sys
import pyarrow.parquet
from lsg.tasks.catalog import load_task
def largest(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
load_task("text", sys.argv[1])
before = largest()
data = load_task("text", sys.argv[2])
print(json.dumps([largest() - before, len(data.train) + len(data.evaluation["held-out"])]))
"""


def used(folder: Path, small: Path, large: Path) -> tuple[int, int]:
    """Bytes that reading the large file takes beyond the small one of its kind, and its rows."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(large)], capture_output=True, text=True, check=True, cwd=folder
    )
    more, rows = json.loads(done.stdout)
    return more, rows


def rows(count: int) -> "dict[str, list[str]]":
    texts = [
        f"a review of about a hundred characters, as they come, number {number}, and so on" for number in range(count)
    ]
    return {"text": texts, "label": [("good", "bad")[number % 2] for number in range(count)]}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_file_is_read_in_twice_its_size(suffix: str, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    files = [tmp_path / f"small{suffix}", tmp_path / f"large{suffix}"]
    for file, count in zip(files, (1000, 300_000), strict=True):
        table = rows(count)
        if suffix == ".csv":
            lines = (f'"{text}",{label}\n' for text, label in zip(*table.values(), strict=True))
            file.write_text("text,label\n" + "".join(lines))
        else:
            parquet.write_table(pyarrow.table(table), file, compression="none")
    more, count = used(tmp_path, *files)
    assert count == 300_000
    assert more < 2 * files[1].stat().st_size


def test_a_small_file_of_many_equal_rows_stays_small(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = {"text": [f"a text {number % 1000}" for number in range(1_000_000)], "label": ["a", "b"] * 500_000}
    parquet.write_table(pyarrow.table({name: column[:1000] for name, column in table.items()}), tmp_path / "s.parquet")
    parquet.write_table(pyarrow.table(table), tmp_path / "l.parquet")
    more, count = used(tmp_path, tmp_path / "s.parquet", tmp_path / "l.parquet")
    assert count == 1_000_000 and more < 100_000_000


def test_columns_hold_what_went_in() -> None:
    texts = TextColumn(["é", "", None, 5, "b" * 300])
    assert list(texts) == ["é", "", None, 5, "b" * 300]
    packed = texts.texts()
    assert packed == ["é", "", "", "", "b" * 300] and packed[1:] == ["", "", "", "b" * 300]
    taken = packed.take([4, 0])  # type: ignore[arg-type]
    assert isinstance(taken, PackedTexts) and list(taken) == ["b" * 300, "é"] and len(taken) == 2
    words = WordColumn(["b", 1, "b", True, None])
    assert list(words) == ["b", 1, "b", True, None] and words.first == [0, 1, 3, 4]


def test_arrays_of_arrow_with_and_without_a_dictionary_are_the_same(tmp_path: Path) -> None:
    import pyarrow

    plain = pyarrow.array(["a", "é", "a", "b"])
    for column in (TextColumn, WordColumn):
        for array in (plain, plain.dictionary_encode()):
            store = column()
            store.extend_arrow(array)
            store.extend_arrow(array[1:])
            assert list(store) == ["a", "é", "a", "b", "é", "a", "b"]


def test_blank_lines_count_within_a_text_and_not_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext,label\r\n"one\n\n\ntwo",a\r\nthree,b\n\r\n\n\n')
    table = read_table(tmp_path / "a.csv", WantedColumns())
    assert list(table.values["text"]) == ["one\n\n\ntwo", "three"] and list(table.numbers) == [2, 6]


def test_a_reading_that_takes_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    with told_to(lambda *event: told.append(event)):
        quick = Reading("x", 10)
        quick.at(5)
        quick.end()
        monkeypatch.setattr(progress, "PATIENCE", -1.0)
        (tmp_path / "a.csv").write_text("text,label\n" + "a text,b\n" * 10_000)
        read_table(tmp_path / "a.csv", WantedColumns())
    size = (tmp_path / "a.csv").stat().st_size
    assert len(told) == 3 and told[-1] == ("reading a.csv", size, size)
