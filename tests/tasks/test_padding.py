"""Text models of `lsg train`: what they say of a record does not depend on its padding, or they are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lsg import ConfigurationError
from lsg.tasks.encoded import EncodedTexts
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.prepare_data import prepare_data
from lsg.train.prepare_model import prepare_model
from tests.support.tiny import WORDS, glue_sst2, tiny_tokenizer

CPU = torch.device("cpu")
VOCABULARY = 4 + len(WORDS)
ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 48}
# The number of the padding token that a decoder was saved with; the tokenizer's is 0.
WRONG = 7
MODELS: dict[str, Any] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES, **ENCODER)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(pad_token_id=0, **SIZES, **ENCODER)),
    "mpnet": lambda: transformers.MPNetModel(transformers.MPNetConfig(pad_token_id=0, **SIZES, **ENCODER)),
    "distilbert": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=32, **SIZES)
    ),
    "gpt2": lambda: transformers.GPT2Model(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=48, vocab_size=VOCABULARY)
    ),
    "gpt2 with another padding token": lambda: transformers.GPT2Model(
        transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=48, vocab_size=VOCABULARY, pad_token_id=WRONG
        )
    ),
    "opt": lambda: transformers.OPTModel(
        transformers.OPTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, word_embed_proj_dim=16, **SIZES
        )
    ),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**SIZES, **ENCODER)),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(glue_sst2(tmp_path_factory.mktemp("texts") / "SST-2"))


def prepared(folder: Path, data: str, base: Any, **settings: Any) -> tuple[Any, EncodedTexts]:
    """What `lsg train` makes of a model on disk and a GLUE folder."""
    torch.manual_seed(3)
    base().save_pretrained(folder)
    tiny_tokenizer(folder)
    config = RunConfig(task="sst2", data=data, model=str(folder), epsilon=1.0, **{"max_length": 32, **settings})
    encoded = prepare_data(config, CPU, Listener())
    assert isinstance(encoded.train, EncodedTexts)
    return prepare_model(config, encoded, CPU, Listener()).eval(), encoded.train


@pytest.mark.parametrize("name", MODELS)
def test_a_record_has_one_answer_however_far_it_is_padded(name: str, data: str, tmp_path: Path) -> None:
    model, records = prepared(tmp_path, data, MODELS[name])
    shortest, longest = int(records.lengths.argmin()), int(records.lengths.argmax())
    narrow, wide = records.__getitems__([shortest]), records.__getitems__([shortest, longest])
    assert narrow["input_ids"].shape[1] < wide["input_ids"].shape[1]
    with torch.no_grad():
        alone, beside = model(**narrow).logits[0], model(**wide).logits[0]
    torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-6)


REFUSED: dict[str, Any] = {
    "fnet": lambda: transformers.FNetModel(  # mixes all positions, and has no mask
        transformers.FNetConfig(hidden_size=16, num_hidden_layers=2, intermediate_size=32, pad_token_id=0, **SIZES)
    ),
    "convbert": lambda: transformers.ConvBertModel(  # convolves over the padding; weights as large as trained ones
        transformers.ConvBertConfig(
            embedding_size=16, head_ratio=1, initializer_range=0.5, conv_kernel_size=3, **SIZES, **ENCODER
        )
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_looks_at_padding_is_refused(name: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=f"--model {tmp_path}: what it says of a text changes with the padding"
    ):
        prepared(tmp_path, data, REFUSED[name])


@pytest.mark.parametrize("pooling", ["model", "mean"])
def test_a_model_that_looks_at_other_texts_is_refused_where_all_are_equally_long(
    pooling: str, data: str, tmp_path: Path
) -> None:
    """Of a frozen encoder, whose features are computed once, no gradient would show it."""
    sizes = {"num_landmarks": 4, "segment_means_seq_len": 8, "inv_coeff_init_option": False, "initializer_range": 0.5}
    mixing = lambda: transformers.NystromformerModel(  # noqa: E731 - it scales attention by a maximum over the batch
        transformers.NystromformerConfig(**SIZES, **ENCODER, **sizes)
    )
    with pytest.raises(ConfigurationError, match="what it says of a text changes with the other records in the batch"):
        prepared(tmp_path, data, mixing, max_length=8, pooling=pooling)
