"""Documents as a language model gets them: which tokens it sees, and which of them carry a loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lsg.errors import ConfigurationError
from lsg.tasks.data import Documents
from lsg.tasks.encoded_documents import encode_documents, encode_prompted
from lsg.tasks.models import load_tokenizer
from tests.support.language import END, PADDING, VOCABULARY, tiny_gpt2, tiny_llama
from tests.support.tiny import tiny_bert

CPU = torch.device("cpu")
THE, FILM, WAS, GOOD = (VOCABULARY.index(word) for word in ("the", "film", "was", "good"))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return load_tokenizer(str(tiny_gpt2(tmp_path)))


def test_a_text_ends_with_the_end_token_and_all_of_it_counts(tokenizer: Any) -> None:
    data = encode_documents(Documents(["the film was good", "good"], None), tokenizer, 16, CPU)
    batch = data.__getitems__([1, 0])
    assert batch["input_ids"].tolist() == [[GOOD, END, *[PADDING] * 6], [THE, FILM, WAS, GOOD, END, *[PADDING] * 3]]
    assert batch["attention_mask"].sum(1).tolist() == [2, 5] and data.lengths.tolist() == [5, 2]
    assert batch["labels"].tolist() == [[GOOD, END, *[-100] * 6], [THE, FILM, WAS, GOOD, END, *[-100] * 3]]
    assert data.unlearnt == 0


def test_a_prompt_is_seen_and_carries_no_loss(tokenizer: Any) -> None:
    data = encode_documents(Documents(["good", "was good"], ["the film was", ""]), tokenizer, 16, CPU)
    batch = data.__getitems__(torch.tensor([0, 1]))
    assert batch["input_ids"][0, :5].tolist() == [THE, FILM, WAS, GOOD, END]
    assert batch["labels"][0, :6].tolist() == [-100, -100, -100, GOOD, END, -100]
    assert batch["labels"][1, :4].tolist() == [WAS, GOOD, END, -100]


def test_the_end_is_a_label_where_it_is_the_padding_as_well(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_llama(tmp_path)))
    assert tokenizer.pad_token_id == END
    batch = encode_documents(Documents(["good"], None), tokenizer, 16, CPU).__getitems__([0])
    assert batch["labels"].tolist() == [[GOOD, END, *[-100] * 6]]


def test_what_is_too_long_is_cut_and_has_no_end(tokenizer: Any) -> None:
    data = encode_documents(
        Documents(["good was good", "good"], ["the film", "the film was the film"]), tokenizer, 4, CPU
    )
    batch = data.__getitems__([0, 1])
    assert batch["input_ids"].tolist() == [[THE, FILM, GOOD, WAS], [THE, FILM, WAS, THE]]
    assert batch["labels"].tolist() == [[-100, -100, GOOD, WAS], [-100] * 4]
    assert data.unlearnt == 1


def test_special_tokens_of_the_tokenizer_stay_at_the_beginning(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_bert(tmp_path)))  # [CLS] before a text, [SEP] behind it
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    plain = encode_documents(Documents(["good"], None), tokenizer, 16, CPU).__getitems__([0])
    prompted = encode_documents(Documents(["good"], ["film"]), tokenizer, 16, CPU).__getitems__([0])
    good, film = tokenizer.convert_tokens_to_ids(["good", "film"])
    assert plain["input_ids"][0, :4].tolist() == [cls, good, sep, tokenizer.pad_token_id]
    assert prompted["input_ids"][0, :5].tolist() == [cls, film, good, sep, tokenizer.pad_token_id]


def test_a_decoder_sees_what_stands_before_each_label(tokenizer: Any) -> None:
    data = encode_prompted(Documents(["was good", "good"], ["the film", ""]), tokenizer, 8, 7, CPU)
    batch = data.__getitems__([0, 1])
    assert batch["input_ids"][:, :2].tolist() == [[THE, FILM], [END, PADDING]]
    assert batch["decoder_input_ids"][0, :3].tolist() == [7, WAS, GOOD]
    assert batch["labels"][0, :4].tolist() == [WAS, GOOD, END, -100]
    assert batch["labels"][1, :3].tolist() == [GOOD, END, -100] and data.lengths.tolist() == [5, 3]


def test_a_tokenizer_without_an_end_is_refused(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    with pytest.raises(ConfigurationError, match="has no end-of-text token"):
        encode_documents(Documents(["good"], None), tokenizer, 8, CPU)
