"""Encoded data sets: batches equal what the tokenizer itself would make, trimmed; images are normalised."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lsg import ConfigurationError
from lsg.sampling.loader import known_lengths
from lsg.tasks.data import Images, Texts
from lsg.tasks.encoded import as_loader, batches_in_order, encode_images, encode_texts
from lsg.tasks.models import load_tokenizer
from tests.support.tiny import tiny_bert

CPU = torch.device("cpu")
TEXTS = ["the film was good", "bad", "the story was very " + "very " * 30 + "dull", "great film ."]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(str(tiny_bert(tmp_path_factory.mktemp("bert"))))


def texts(pairs: bool = False) -> Texts:
    return Texts(TEXTS, list(reversed(TEXTS)) if pairs else None, torch.arange(len(TEXTS)))


@pytest.mark.parametrize("pairs", [False, True])
def test_a_batch_is_what_the_tokenizer_makes_padded_to_a_multiple_of_8_or_max_length(
    tokenizer: Any, pairs: bool
) -> None:
    data = encode_texts(texts(pairs), tokenizer, 24, CPU)
    for chosen in ([0, 1], [3], [1, 2, 0]):
        batch = data.__getitems__(chosen)
        second = [list(reversed(TEXTS))[i] for i in chosen] if pairs else None
        wanted = tokenizer(
            [TEXTS[i] for i in chosen],
            second,
            truncation=True,
            max_length=24,
            padding="max_length",
            return_tensors="pt",
        )
        width = min(24, -(-int(wanted["attention_mask"].sum(dim=1).max()) // 8) * 8)
        assert batch["labels"].tolist() == chosen
        assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
        for key in wanted:
            assert torch.equal(batch[key], wanted[key][:, :width]), key
            assert batch[key].dtype == torch.long


def test_without_token_types_there_are_none(tokenizer: Any) -> None:
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    try:
        assert "token_type_ids" not in encode_texts(texts(), tokenizer, 24, CPU).__getitems__([0])
    finally:
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]


def test_lengths_are_known_to_loaders_and_batches_reach_them_whole(tokenizer: Any) -> None:
    data = encode_texts(texts(), tokenizer, 24, CPU)
    assert torch.as_tensor(known_lengths(data)).tolist() == [6, 3, 24, 5]
    loader = as_loader(data, 3)
    assert isinstance(loader, DataLoader)
    assert [batch["labels"].tolist() for batch in loader] == [[0, 1, 2], [3]]


def test_evaluation_sees_every_record_once_sorted_by_length(tokenizer: Any) -> None:
    data = encode_texts(texts(), tokenizer, 24, CPU)
    assert [batch["labels"].tolist() for batch in batches_in_order(data, 3)] == [[1, 3, 0], [2]]


def test_progress_is_reported(tokenizer: Any) -> None:
    done: list[int] = []
    encode_texts(texts(), tokenizer, 24, CPU, done.append)
    assert done == [4]


def test_images_are_normalised_by_the_constants_given() -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 4, 4).clone()
    data = encode_images(Images(pixels, torch.tensor([7, 8])), (0.5, 0.25, 0.0), (0.5, 0.5, 1.0), CPU)
    images, labels = data.__getitems__([1, 0, 1])
    assert labels.tolist() == [8, 7, 8] and images.dtype == torch.float32
    assert images[0, :, 0, 0].tolist() == [1.0, 1.5, 1.0] and images[1, :, 0, 0].tolist() == [-1.0, -0.5, 0.0]


def test_constants_for_another_number_of_channels_are_refused() -> None:
    images = Images(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ConfigurationError, match="2 means and 1 deviations for images of 3 channels"):
        encode_images(images, (0.5, 0.5), (0.5,), CPU)
