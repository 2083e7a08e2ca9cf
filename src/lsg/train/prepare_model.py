"""What a run trains: a configuration and its data in, a seeded model on a device and its optimizer out."""

from typing import Any

import torch
from torch import nn

from lsg.errors import ConfigurationError
from lsg.tasks.encoded import EncodedLanguage, EncodedTexts
from lsg.tasks.encoded_documents import EncodedPrompted
from lsg.tasks.language_check import check_language_model
from lsg.tasks.language_models import load_language_model, select_written, with_adapters
from lsg.tasks.models import (
    head_parameters,
    load_image_model,
    load_pooled_model,
    load_text_model,
    select_trained,
)
from lsg.tasks.padding import check_padding
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.prepare_data import PreparedData


def prepare_model(config: RunConfig, data: PreparedData, device: torch.device, listener: Listener) -> nn.Module:
    """On the device, with its trained parameters chosen. New weights follow from the seed."""
    torch.manual_seed(config.seed)
    model: Any
    if data.shape is not None:
        model = load_image_model(config.model, data.shape)
    elif isinstance(data.train, EncodedLanguage):
        return _language_model(config, data, data.train).to(device)
    else:
        assert data.tokenizer is not None
        model = _text_model(config, data.label_names, listener)
        # Decoders find the last token of a text by this number: with another one they would take a padding.
        model.config.pad_token_id = data.tokenizer.pad_token_id
        _check_positions(model, config, data)
        _check_vocabulary(model, config, data)
        assert isinstance(data.train, EncodedTexts)
        check_padding(model, data.tokenizer, data.train.ids.shape[1], config.model)
    select_trained(model, config.trainable)
    model.to(device)
    if data.shape is not None and device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    return model


def _language_model(config: RunConfig, data: PreparedData, train: EncodedLanguage) -> nn.Module:
    model = load_language_model(config.model)
    _check_vocabulary(model, config, data)
    check_language_model(model, train, config.max_length, len(data.tokenizer), config.model)  # type: ignore[arg-type]
    if config.lora is not None:
        adapted: nn.Module = with_adapters(model, config.lora)
        return adapted
    select_written(model, config.trainable)
    whole: nn.Module = model
    return whole


def _check_vocabulary(model: Any, config: RunConfig, data: PreparedData) -> None:
    assert data.tokenizer is not None
    rows = model.get_input_embeddings().num_embeddings
    if len(data.tokenizer) > rows:
        raise ConfigurationError(
            f"--model {config.model}: its tokenizer knows {len(data.tokenizer)} tokens and its model {rows}"
        )
    start = data.train.start if isinstance(data.train, EncodedPrompted) else 0
    for number, what in ((start, "decoder_start_token_id"), (max(data.tokenizer.get_vocab().values()), "last token")):
        if not 0 <= number < rows:
            raise ConfigurationError(f"--model {config.model}: its {what} is number {number}, and its model has {rows}")


def _text_model(config: RunConfig, label_names: tuple[str, ...], listener: Listener) -> nn.Module:
    if config.pooling != "model":
        return load_pooled_model(config.model, config.pooling, label_names)
    model, new = load_text_model(config.model, label_names, of_words=config.kind == "tokens")
    if new:
        listener.note(f"{config.model}: new, seeded weights for {', '.join(new)}")
    return model


def _check_positions(model: nn.Module, config: RunConfig, data: PreparedData) -> None:
    """A tokenizer need not know how many positions its model has learnt."""
    parts = [part for part in (data.train, *data.evaluation.values()) if isinstance(part, EncodedTexts)]
    longest = max(int(part.lengths.max()) for part in parts)
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding) and name.endswith("position_embeddings") and table.num_embeddings < longest:
            raise ConfigurationError(
                f"--max-length {config.max_length}: the longest text has {longest} tokens, and --model {config.model} "
                f"has {table.num_embeddings} positions"
            )


def make_optimizer(config: RunConfig, whole: nn.Module) -> torch.optim.Optimizer:
    """Of all that is trained in the whole model."""
    trained = [p for p in whole.parameters() if p.requires_grad]
    groups = _rates(config, whole, trained)
    fused = trained[0].is_cuda
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused)
    return torch.optim.AdamW(groups, eps=config.adam_eps, weight_decay=config.weight_decay, fused=fused)


def _rates(config: RunConfig, model: nn.Module, trained: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups of parameters: one where all have the same learning rate, the head first where it has its own."""
    head = {id(p) for p in head_parameters(model)} if config.head_lr != 1 else set()
    groups = [
        {"params": [p for p in trained if id(p) in head], "lr": config.lr * config.head_lr},
        {"params": [p for p in trained if id(p) not in head], "lr": config.lr},
    ]
    return [group for group in groups if group["params"]]
