"""Language models of `lsg train`: which are taken, what of them trains, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lsg.errors import ConfigurationError
from lsg.tasks.data import Documents
from lsg.tasks.encoded_documents import encode_documents
from lsg.tasks.language_check import check_language_model
from lsg.tasks.language_models import load_language_model, select_written, with_adapters
from lsg.tasks.models import load_tokenizer
from tests.support.language import SIZES, VOCABULARY, tiny_gpt2, tiny_llama, tiny_t5

CPU = torch.device("cpu")


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_matrices_of_the_blocks_train_and_tables_do_not(tmp_path: Path) -> None:
    model = load_language_model(str(tiny_llama(tmp_path)))
    select_written(model, "paper")
    assert len(trained(model)) == 14 and all("layers" in name and "norm" not in name for name in trained(model))
    select_written(model, "bias")
    assert all("norm" in name for name in trained(model))
    select_written(model, "all")
    assert "model.embed_tokens.weight" in trained(model)


def test_an_untied_output_layer_stays_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(VOCABULARY), tie_word_embeddings=False, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = load_language_model(str(tmp_path))
    select_written(model, "paper")
    assert len(trained(model)) == 14 and "lm_head.weight" not in trained(model)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_t5])
def test_adapters_alone_train_and_begin_as_nothing(make: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = load_language_model(str(make(tmp_path))).eval()
    tokens = {"input_ids": torch.tensor([[3, 4, 5]])}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = torch.tensor([[0, 6]])
    before = model(**tokens).logits
    adapted = with_adapters(model, 2).eval()
    assert trained(adapted) and all("lora_" in name for name in trained(adapted))
    torch.testing.assert_close(adapted(**tokens).logits, before)


def test_models_that_are_no_language_models_are_refused(tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(ConfigurationError) as error:
            load_language_model(str(folder))
        return str(error.value)

    assert "scatter-linear is for images" in refusal(Path("scatter-linear"))
    assert "has no config.json" in refusal(tmp_path)
    transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path / "vit")
    assert "a vit model writes no texts" in refusal(tmp_path / "vit")
    config = transformers.LlamaConfig(vocab_size=len(VOCABULARY), **SIZES)
    transformers.LlamaModel(config).save_pretrained(tmp_path / "base")
    assert "its files lack weights of a LlamaForCausalLM (lm_head.weight)" in refusal(tmp_path / "base")
    model = transformers.LlamaForCausalLM(config)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    config.save_pretrained(tmp_path)
    assert "cannot load its weights" in refusal(tmp_path)


def test_a_model_whose_layers_peft_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    model = load_language_model(str(tiny_llama(tmp_path)))
    monkeypatch.setattr(type(model.config), "model_type", "unheard_of")
    with pytest.raises(ConfigurationError, match="--lora 2: PEFT does not know which layers of a llama model"):
        with_adapters(model, 2)


def checked(folder: Path, model: Any, most: int = 24) -> None:
    tokenizer = load_tokenizer(str(tiny_gpt2(folder / "gpt2")))
    data = encode_documents(Documents(["the film was good " * 5], None), tokenizer, 24, CPU)
    check_language_model(model, data, most, len(tokenizer), "mine")


def test_a_model_that_looks_ahead_or_at_others_is_refused(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": len(VOCABULARY), **SIZES}
    torch.manual_seed(0)
    checked(tmp_path, transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
    with pytest.raises(ConfigurationError, match=r"--model mine: .* changes with the tokens that follow"):
        checked(tmp_path / "bert", transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=False)))
    mixing = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    mixing.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output + output.mean(0))
    with pytest.raises(ConfigurationError, match=r"--model mine: .* changes with the other records in the batch"):
        checked(tmp_path / "mixing", mixing)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_model_whose_positions_are_scaled_with_the_width_of_a_batch_is_refused(tmp_path: Path, kind: str) -> None:
    """Beyond the width that it was pretrained with a longer record would change what it says of others."""
    pretrained = 96
    positions: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        positions |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        positions |= {"original_max_position_embeddings": pretrained}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(VOCABULARY),
        max_position_embeddings=pretrained if kind == "dynamic" else 4 * pretrained,
        rope_parameters=positions,
        initializer_range=0.3,
        **SIZES,
    )
    model = transformers.LlamaForCausalLM(config)
    checked(tmp_path, model, pretrained)
    with pytest.raises(ConfigurationError, match=r"mine: .* changes in a batch of 128 tokens, .* a smaller --max-len"):
        checked(tmp_path / "wide", model, 128)


def test_a_folder_of_adapters_is_refused(tmp_path: Path) -> None:
    """transformers would follow them to the model that they name, and lsg would train and save that one's."""
    pytest.importorskip("peft")
    base = tiny_gpt2(tmp_path / "base")
    adapters = with_adapters(load_language_model(str(base)), 2)
    adapters.save_pretrained(tmp_path / "adapters")
    adapters.save_pretrained(tiny_gpt2(tmp_path / "both"))
    for folder, words in (("adapters", "no config.json: it holds adapters, and not"), ("both", "it holds adapters")):
        with pytest.raises(ConfigurationError, match=words):
            load_language_model(str(tmp_path / folder))


def test_a_rank_that_no_matrix_has_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ConfigurationError, match=r"--lora 1000000: no matrix of this model has a rank above"):
        with_adapters(load_language_model(str(tiny_gpt2(tmp_path))), 10**6)
