"""A pooled classifier: what it computes, what it saves, and features that are computed once."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lsg.errors import ConfigurationError
from lsg.tasks.data import Texts
from lsg.tasks.encoded import encode_texts
from lsg.tasks.features import compute_features
from lsg.tasks.models import load_pooled_model, load_tokenizer, save_text_model
from lsg.tasks.pooled import PooledClassifier
from tests.support.tiny import tiny_bert

TEXTS = Texts(["a fine film", "dull", "a dull and long film that is not fine at all"] * 5, None, torch.zeros(15).long())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_bert(tmp_path_factory.mktemp("model") / "bert"))


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_head_sees_the_pooled_tokens_of_each_text_alone(folder: str, pooling: str) -> None:
    torch.manual_seed(0)
    model = load_pooled_model(folder, pooling, ("no", "yes")).eval()
    data = encode_texts(TEXTS, load_tokenizer(folder), 32, torch.device("cpu"))
    batch = data.__getitems__(range(3))
    labels = batch.pop("labels")
    assert model(**batch).logits.shape == (len(labels), 2)
    for row in range(3):
        length = int(data.lengths[row])
        alone = {key: value[row : row + 1, :length] for key, value in batch.items()}
        tokens = model.encoder(**alone)[0][0]
        pooled = tokens.mean(dim=0) if pooling == "mean" else tokens[0]
        torch.testing.assert_close(model.features(**batch)[row], F.layer_norm(pooled, pooled.shape))


def test_the_pooler_is_gone_and_all_that_trains_is_used(folder: str) -> None:
    model = load_pooled_model(folder, "mean", ("no", "yes"))
    assert not any("pooler" in name for name, _ in model.named_parameters())


def test_a_saved_model_says_the_same(folder: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = load_pooled_model(folder, "mean", ("no", "yes")).eval()
    tokenizer = load_tokenizer(folder)
    save_text_model(tmp_path / "saved", model, tokenizer)
    again = PooledClassifier.from_pretrained(tmp_path / "saved")
    assert again.labels == ("no", "yes") and again.config.id2label == {0: "no", 1: "yes"}
    batch = encode_texts(TEXTS, tokenizer, 32, torch.device("cpu")).__getitems__(range(5))
    del batch["labels"]
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits)


def test_a_folder_without_a_head_is_refused(folder: str) -> None:
    with pytest.raises(ConfigurationError, match="holds no classifier of `lsg train`"):
        PooledClassifier.from_pretrained(folder)


def test_features_computed_once_are_those_of_the_model_in_the_records_order(folder: str) -> None:
    torch.manual_seed(0)
    model = load_pooled_model(folder, "mean", ("no", "yes"))
    data = encode_texts(TEXTS, load_tokenizer(folder), 32, torch.device("cpu"))
    done: list[int] = []
    features = compute_features(model, data, torch.no_grad, done.append)
    assert done[-1] == len(data) and model.training
    batch = data.__getitems__(range(len(data)))
    labels = batch.pop("labels")
    torch.testing.assert_close(features.features, model.eval().features(**batch))
    torch.testing.assert_close(features.__getitems__([2, 0])[0], features.features[[2, 0]])
    torch.testing.assert_close(features.labels, labels)


def test_a_saved_tokenizer_tells_no_length_of_a_training_text(folder: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    encode_texts(TEXTS, tokenizer, 24, torch.device("cpu"))
    save_text_model(tmp_path / "saved", load_pooled_model(folder, "mean", ("no", "yes")), tokenizer)
    kept = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    assert kept["truncation"] is None and kept["padding"] is None


def test_features_of_a_text_are_computed_in_a_batch_of_the_same_shape_whatever_other_texts_there_are(
    folder: str,
) -> None:
    torch.manual_seed(0)
    model, tokenizer = load_pooled_model(folder, "mean", ("no", "yes")), load_tokenizer(folder)
    shapes: list[tuple[int, ...]] = []
    model.encoder.register_forward_pre_hook(
        lambda module, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    found = []
    for texts in (TEXTS, TEXTS.take(list(range(1, 15)))):  # without the first one
        data = encode_texts(texts, tokenizer, 32, torch.device("cpu"))
        found.append(compute_features(model, data, torch.no_grad, lambda done: None).features)
    assert set(shapes[: len(shapes) // 2]) == set(shapes[len(shapes) // 2 :]) and len({rows for rows, _ in shapes}) == 1
    assert torch.equal(found[0][1:], found[1])
