"""Splits by content: one record more or less moves no other one, in every place where a part of the data is chosen."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from lsg import ConfigurationError
from lsg.tasks.catalog import load_task
from lsg.tasks.data import Images, TaskData, Texts
from lsg.tasks.encoded import EncodedImages
from lsg.tasks.split import divide
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.prepare_data import _CACHE, prepare_data

CPU = torch.device("cpu")
ROWS = [f"text {number}" for number in range(100)]


def texts(rows: list[str]) -> Texts:
    return Texts(rows, None, torch.zeros(len(rows), dtype=torch.long))


def sides(rows: list[str], share: float = 0.3, use: str = "a use") -> dict[str, bool]:
    inside, outside = divide(texts(rows), share, use)
    assert isinstance(inside, Texts) and isinstance(outside, Texts)
    assert not {*inside.texts} & {*outside.texts}
    return dict.fromkeys(inside.texts, True) | dict.fromkeys(outside.texts, False)


def test_one_record_more_or_less_moves_no_other_record() -> None:
    whole = sides(ROWS)
    assert len(whole) == len(ROWS) and 10 < sum(whole.values()) < 50
    for row in range(len(ROWS)):
        fewer = ROWS[:row] + ROWS[row + 1 :]
        assert sides(fewer) == {text: side for text, side in whole.items() if text != ROWS[row]}
    assert sides([*ROWS, ROWS[3], "new"]) == whole | {"new": sides(["new"])["new"]}
    assert sides(ROWS[::-1]) == whole


def test_a_larger_share_holds_the_smaller_and_uses_are_independent() -> None:
    small, large, other = sides(ROWS, 0.2), sides(ROWS, 0.6), sides(ROWS, 0.6, use="another use")
    assert all(large[text] for text in ROWS if small[text])
    both = sum(large[text] and other[text] for text in ROWS)
    assert 36 - 20 < both < 36 + 20  # four standard deviations


def test_pairs_and_pixels_are_content_and_labels_are_not() -> None:
    def side(records: Texts | Images) -> list[bool]:
        chosen = divide(records, 0.5, "a use")[0]
        rows = chosen.labels.tolist()
        return [row in rows for row in range(len(records))]

    numbers = torch.arange(50)
    plain = side(Texts(["a"] * 50, None, numbers))
    assert len({*plain}) == 1  # equal texts stay together, whatever their labels
    assert len({*side(Texts(["a"] * 50, [str(number) for number in range(50)], numbers))}) == 2
    pixels = torch.arange(50, dtype=torch.uint8).view(50, 1, 1, 1)
    assert len({*side(Images(pixels, numbers))}) == 2
    assert len({*side(Images(torch.zeros_like(pixels), numbers))}) == 1


def write_texts(folder: Path, rows: list[int]) -> TaskData:
    folder.mkdir(exist_ok=True)
    lines = [f"text {number}\t{number % 2}" for number in rows]
    (folder / "data.tsv").write_text("text\tlabel\n" + "\n".join(lines) + "\n")
    return load_task("text", str(folder / "data.tsv"))


def write_images(folder: Path, rows: list[int]) -> Path:
    for number in rows:
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (number, 0, 0)).save(path)
    return folder


def test_one_row_more_of_a_file_moves_no_other_row(tmp_path: Path) -> None:
    fewer, more = write_texts(tmp_path, [*range(200)]), write_texts(tmp_path, [777, *range(200)])
    assert isinstance(fewer.train, Texts) and isinstance(more.train, Texts)
    assert {*more.train.texts} ^ {*fewer.train.texts} <= {"text 777"}
    assert "held out for evaluation, chosen by a hash" in more.used


@pytest.mark.parametrize(
    "shares", [{}, {"validation": 0.3}, {"train_limit": 0.5}, {"validation": 0.3, "train_limit": 0.5}]
)
def test_one_photo_more_in_a_folder_moves_no_other_photo(tmp_path: Path, shares: dict[str, float]) -> None:
    def trained_on(name: str, rows: list[int]) -> set[int]:
        config = RunConfig(task="images", model="small-cnn", data=str(write_images(tmp_path / name, rows)), epsilon=1.0)
        _CACHE.clear()
        data = prepare_data(RunConfig(**config.to_dict() | shares), CPU, Listener()).train
        assert isinstance(data, EncodedImages)
        return {*data.pixels[:, 0, 0, 0].tolist()}

    rows = [*range(0, 200, 3)]
    fewer, more = trained_on("fewer", rows), trained_on("more", [*rows, 1])
    assert more ^ fewer <= {1} and 5 < len(fewer) < len(rows)


def test_too_few_records_for_two_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"data.tsv: 2 records, too few: 0 of them fall into the tenth"):
        write_texts(tmp_path, [0, 1])


@pytest.mark.parametrize("option", ["validation", "train_limit"])
def test_a_number_of_records_in_place_of_a_share_is_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"--{option.replace('_', '-')} 1000 must be a share"):
        RunConfig(task="digits", model="small-cnn", epsilon=1.0, **{option: 1000})
