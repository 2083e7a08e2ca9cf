"""Models by name: fresh heads, what trains, saving and loading, and every refusal by name."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lsg import ConfigurationError
from lsg.models import small_cnn
from lsg.tasks.models import (
    ImageShape,
    load_image_model,
    load_text_model,
    load_tokenizer,
    load_trained_image_model,
    save_image_model,
    save_text_model,
    select_trained,
)
from tests.support.tiny import tiny_bert, tiny_tokenizer

DIGITS = ImageShape(classes=10, channels=1, height=8, width=8)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_bert(tmp_path_factory.mktemp("bert")))


def loaded(folder: str, *labels: str, seed: int = 0) -> tuple[nn.Module, list[str]]:
    torch.manual_seed(seed)
    return load_text_model(folder, labels or ("no", "yes"))


def test_a_base_encoder_gets_a_fresh_head_that_follows_from_the_seed(
    bert: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model, new = loaded(bert)
    assert new == ["classifier.bias", "classifier.weight"]
    again, other = loaded(bert)[0].state_dict(), loaded(bert, seed=1)[0].state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, other[name]) == (name != "classifier.weight"), name
    assert capfd.readouterr() == ("", "")  # neither load report nor progress bar


def test_a_head_for_another_number_of_labels_is_replaced_and_the_rest_kept(bert: str, tmp_path: Path) -> None:
    save_text_model(tmp_path, loaded(bert)[0], load_tokenizer(bert))
    model, new = loaded(str(tmp_path), "a", "b", "c")
    assert new == ["classifier.bias", "classifier.weight"]
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert loaded(str(tmp_path))[1] == []


def trained(model: nn.Module, trainable: str) -> set[str]:
    select_trained(model, trainable)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_paper_trains_weight_matrices_and_the_head(bert: str) -> None:
    model = loaded(bert)[0]
    head = {"classifier.weight", "classifier.bias"}
    layers = [f"bert.encoder.layer.{number}" for number in range(2)]
    inside = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    weights = {f"{layer}.{part}.weight" for layer in layers for part in (*inside, "intermediate.dense", "output.dense")}
    assert trained(model, "paper") == head | weights | {"bert.pooler.dense.weight"}
    assert trained(model, "head") == head
    assert trained(model, "all") == {name for name, _ in model.named_parameters()}


def test_zoo_models_train_whole_in_the_paper() -> None:
    model = load_image_model("wrn28-2", ImageShape(10, 3, 32, 32))
    assert trained(model, "paper") == trained(model, "all") == {name for name, _ in model.named_parameters()}
    assert trained(model, "head") == {"head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["small-cnn", "small-cnn-wide"])
def test_an_image_model_comes_back_from_disk(name: str, tmp_path: Path) -> None:
    model = load_image_model(name, DIGITS)
    save_image_model(tmp_path / "model", model, name, DIGITS, {"label_names": ["0"]})
    back = load_trained_image_model(tmp_path / "model")
    assert type(back) is type(small_cnn())
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_text_model_comes_back_with_its_tokenizer(bert: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = loaded(bert)[0].eval()
    save_text_model(tmp_path, model, load_tokenizer(bert))
    tokens = AutoTokenizer.from_pretrained(tmp_path)("the film was good", return_tensors="pt")
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(back(**tokens).logits, model(**tokens).logits)
    assert not list(tmp_path.glob("*.bin"))


def folder_of(kind: str, path: Path) -> Path:
    """A broken model folder of this kind."""
    import transformers

    if kind == "nothing":
        (path / "config.json").write_text("{}")
    elif kind == "no classifier":
        transformers.CLIPVisionConfig().save_pretrained(path)
    elif kind == "pickle":
        tiny_bert(path)
        (path / "model.safetensors").unlink()
        torch.save({}, path / "pytorch_model.bin")
    elif kind == "damaged":
        tiny_bert(path)
        (path / "model.safetensors").write_bytes(b"\x00" * 100)
    elif kind == "nested":
        (path / "inner").mkdir()
        tiny_bert(path / "inner")
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "has no config.json"),
        ("nested", "did you mean .*inner"),
        ("nothing", "cannot load its configuration"),
        ("no classifier", "a clip_vision_model model cannot classify texts"),
        ("pickle", "cannot load its weights"),
        ("damaged", "cannot load its weights"),
    ],
)
def test_a_folder_that_is_no_classifier_is_refused_in_one_line_that_names_it(
    kind: str, message: str, tmp_path: Path
) -> None:
    folder = folder_of(kind, tmp_path)
    with pytest.raises(ConfigurationError, match=message) as error:
        loaded(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_weights_of_another_architecture_are_refused(bert: str, tmp_path: Path) -> None:
    from transformers import DistilBertConfig

    DistilBertConfig(dim=8, n_layers=1, n_heads=1, hidden_dim=8, vocab_size=30).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((Path(bert) / "model.safetensors").read_bytes())
    with pytest.raises(ConfigurationError, match="its weights fit none of"):
        loaded(str(tmp_path))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigurationError, match="it has no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    import json

    tiny_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["eos_token"] = settings.pop("pad_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert load_tokenizer(str(tmp_path)).pad_token_id == 0


def test_kinds_are_not_mixed_up() -> None:
    with pytest.raises(ConfigurationError, match="--model wrn28-2 is for images"):
        loaded("wrn28-2")
    with pytest.raises(ConfigurationError, match="--model 'roberta-base' must be one of wrn28-2"):
        load_image_model("roberta-base", DIGITS)
    with pytest.raises(ConfigurationError, match="square images, and these are 8 x 9"):
        load_image_model("small-cnn", ImageShape(10, 1, 8, 9))
