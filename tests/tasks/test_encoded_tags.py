"""Words with tags as a model gets them: which token has which label."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from lsg.errors import ConfigurationError
from lsg.tasks.data import Tagged
from lsg.tasks.encoded_tags import encode_tags
from lsg.tasks.models import load_tokenizer
from lsg.tasks.packed_lists import ListColumn
from tests.support.tagged import byte_tokenizer
from tests.support.tiny import tiny_bert

CPU = torch.device("cpu")


def tagged_of(words: list[list[str]], tags: list[list[int]]) -> Tagged:
    packed = [ListColumn(rows) for rows in (words, tags)]
    return Tagged(*(column.lists(column.distinct) for column in packed))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return load_tokenizer(str(tiny_bert(tmp_path)), of_words=True)


def test_the_first_token_of_a_word_has_its_tag(tokenizer: Any) -> None:
    """A tokenizer that splits "film.story" makes three tokens of that word."""
    data = encode_tags(tagged_of([["good"], ["the", "film.story", "was"]], [[3], [0, 1, 2]]), tokenizer, 16, CPU)
    batch = data.__getitems__([1, 0])
    assert batch["labels"].tolist() == [[-100, 0, 1, -100, -100, 2, -100, -100], [-100, 3, *[-100] * 6]]
    assert batch["attention_mask"].sum(1).tolist() == [7, 3] and batch["token_type_ids"].shape == (2, 8)
    assert data.words.tolist() == [1, 3] and data.seen == 4 and data.unseen == 0


def test_words_that_are_cut_off_or_empty_have_no_label(tokenizer: Any) -> None:
    data = encode_tags(tagged_of([["the", "", " ", "was", "very"]], [[0, 1, 1, 2, 1]]), tokenizer, 4, CPU)
    assert data.__getitems__([0])["labels"].tolist() == [[-100, 0, 2, -100]]
    assert data.words.tolist() == [5] and data.unseen == 3


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_of_bytes_sees_words_with_a_blank_before_each(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(byte_tokenizer(tmp_path, kind)), of_words=True)
    data = encode_tags(tagged_of([["good", "film"]], [[0, 1]]), tokenizer, 16, CPU)
    ids = data.ids[0, : data.lengths[0]].tolist()
    assert tokenizer.decode(ids) == " good film"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(["good", "film"], is_split_into_words=True)["input_ids"] == ids
    labels = data.__getitems__([0])["labels"][0].tolist()
    assert sorted(label for label in labels if label != -100) == [0, 1]


def test_a_tokenizer_that_cannot_tell_words_is_refused(tokenizer: Any) -> None:
    class Slow:
        is_fast, name_or_path = False, "somebody/slow"

    with pytest.raises(ConfigurationError, match="somebody/slow: its tokenizer does not tell which word a token is of"):
        encode_tags(tagged_of([["a"]], [[0]]), Slow(), 16, CPU)


def test_lists_are_taken_without_copies() -> None:
    column = ListColumn([["a", "b"], None, ["b"], []])
    assert list(column) == [["a", "b"], None, ["b"], []] and column.first == [0, 0] and column.no_lists == {1: None}
    lists = column.lists(["x", "y"])
    assert list(lists) == [["x", "y"], [], ["y"], []] and lists[2:] == [["y"], []]
    assert list(lists.take(np.array([2, 0]))) == [["y"], ["x", "y"]]
