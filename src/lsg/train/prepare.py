"""From a configuration to what a run trains: data encoded on a device, a seeded model, an optimizer."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lsg.errors import ConfigurationError
from lsg.tasks.data import Images, Records, TaskData, Texts
from lsg.tasks.encoded import Encoded, EncodedTexts, encode_images, encode_texts
from lsg.tasks.models import (
    ImageShape,
    check_model_kind,
    load_image_model,
    load_text_model,
    load_tokenizer,
    select_trained,
)
from lsg.tasks.padding import check_padding
from lsg.tasks.readers.files import local_path
from lsg.tasks.split import HOW, divide
from lsg.train.config import RunConfig
from lsg.train.listener import Listener

# Mean and deviation of each channel, as published; other images are brought to [-1, 1]. Never computed from the data at
# hand, which is private.
NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
}
PLAIN_NORMALISATION = ((0.5,), (0.5,))
LOCAL = "local, not named here"
_NAMED = 10  # labels in the line about the data
_KEPT = 2  # data sets, encoded, for the next run of this process
_CACHE: dict[tuple[Any, ...], "Prepared"] = {}


@dataclass(frozen=True)
class Prepared:
    """Encoded data. source, used: see `TaskData`. tokenizer: of texts; shape: of images; pairs: two texts a record.

    data_name, model_name: what a release may call them. A name on the hub, or no name where they are local: a path
    tells of the people, machines and projects behind it.
    """

    train: Encoded
    evaluation: dict[str, Encoded]
    label_names: tuple[str, ...]
    source: str
    used: str
    data_name: str
    model_name: str
    tokenizer: Any | None = None
    shape: ImageShape | None = None
    pairs: bool = False


def prepare_data(config: RunConfig, device: torch.device, listener: Listener) -> Prepared:
    """The task's data, with `train_limit` and `validation` applied."""
    columns = (config.text_column, config.pair_column, config.label_column)
    shares = (config.train_limit, config.validation)
    key = (config.task, config.data, columns, config.model, config.max_length, shares, device)
    if key not in _CACHE:
        encoded = _encode(config, _divided(_read(config), config), device, listener)
        while len(_CACHE) >= _KEPT:
            del _CACHE[next(iter(_CACHE))]
        _CACHE[key] = encoded
    data = _CACHE[key]
    sizes = ", ".join(f"{len(part):,} for {name}" for name, part in data.evaluation.items())
    labels = ", ".join(data.label_names[:_NAMED]) + (", ..." if len(data.label_names) > _NAMED else "")
    listener.note(f"{data.source}: {len(data.train):,} records for training, {sizes}; labels {labels}")
    return data


def _read(config: RunConfig) -> TaskData:
    from lsg.tasks.catalog import TASKS, check_task, load_task

    check_task(config.task)
    check_model_kind(config.model, TASKS[config.task].kind)  # before the data, which may take minutes
    return load_task(
        config.task,
        config.data,
        text_column=config.text_column,
        pair_column=config.pair_column,
        label_column=config.label_column,
    )


def _divided(data: TaskData, config: RunConfig) -> TaskData:
    """With `validation` held out of the training records, and `train_limit` of the others kept."""
    train, evaluation, used = data.train, data.evaluation, [data.used] if data.used else []
    if config.validation:
        validation, train = divide(train, config.validation, "validation")
        evaluation = {"validation": validation}
        used.append(f"all but about {100 * config.validation:g} %, held out for validation, {HOW}")
    if config.train_limit:
        train, _ = divide(train, config.train_limit, "train-limit")
        used.append(f"about {100 * config.train_limit:g} %, {HOW}")
    return replace(data, train=train, evaluation=evaluation, used="; of those ".join(used))


def _encode(config: RunConfig, data: TaskData, device: torch.device, listener: Listener) -> Prepared:
    parts = {"train": data.train, **data.evaluation}
    is_local = config.data is not None and local_path(config.data) is not None
    common: dict[str, Any] = {
        "label_names": data.label_names,
        "source": data.source,
        "used": data.used,
        "data_name": LOCAL if is_local else data.source,
        "model_name": LOCAL if Path(config.model).exists() else config.model,
    }
    for name, part in parts.items():
        if not len(part):
            raise ConfigurationError(f"{data.source}: its part '{name}' has no records")
    if isinstance(data.train, Images):
        shape = ImageShape(len(data.label_names), *data.train.pixels.shape[1:])
        for name, part in parts.items():
            size = tuple(_images(part).pixels.shape[1:])
            if size != tuple(data.train.pixels.shape[1:]):
                raise ConfigurationError(
                    f"{data.source}: images of its part '{name}' have channels, height and width {size}, those for "
                    f"training {tuple(data.train.pixels.shape[1:])}"
                )
        mean, deviation = NORMALISATION.get(config.task, PLAIN_NORMALISATION)
        train, *rest = (encode_images(_images(part), mean, deviation, device) for part in parts.values())
        evaluation: dict[str, Encoded] = dict(zip(data.evaluation, rest, strict=True))
        return Prepared(train, evaluation, shape=shape, **common)
    tokenizer = load_tokenizer(config.model)
    if config.max_length > tokenizer.model_max_length:
        raise ConfigurationError(
            f"--max-length {config.max_length} is more than the {tokenizer.model_max_length} tokens that --model "
            f"{config.model} can read"
        )
    pairs = _texts(data.train).pairs is not None
    least = tokenizer.num_special_tokens_to_add(pair=pairs) + 1
    if config.max_length < least:
        raise ConfigurationError(f"--max-length {config.max_length}: --model {config.model} needs at least {least}")
    encoded = {}
    for name, part in parts.items():
        report = partial(listener.tokenized, name, total=len(part))
        encoded[name] = encode_texts(_texts(part), tokenizer, config.max_length, device, report)
    return Prepared(encoded.pop("train"), {**encoded}, tokenizer=tokenizer, pairs=pairs, **common)


def _images(part: Records) -> Images:
    assert isinstance(part, Images)
    return part


def _texts(part: Records) -> Texts:
    assert isinstance(part, Texts)
    return part


def prepare_model(config: RunConfig, data: Prepared, device: torch.device, listener: Listener) -> nn.Module:
    """On the device, with its trained parameters chosen. New weights follow from the seed."""
    torch.manual_seed(config.seed)
    model: Any
    if data.shape is not None:
        model = load_image_model(config.model, data.shape)
    else:
        assert data.tokenizer is not None
        model, new = load_text_model(config.model, data.label_names)
        if new:
            listener.note(f"{config.model}: new, seeded weights for {', '.join(new)}")
        # Decoders find the last token of a text by this number: with another one they would take a padding.
        model.config.pad_token_id = data.tokenizer.pad_token_id
        _check_positions(model, config, data)
        rows = model.get_input_embeddings().num_embeddings
        if len(data.tokenizer) > rows:
            raise ConfigurationError(
                f"--model {config.model}: its tokenizer knows {len(data.tokenizer)} tokens and its model {rows}"
            )
        assert isinstance(data.train, EncodedTexts)
        check_padding(model, data.tokenizer, data.train.ids.shape[1], config.model)
    select_trained(model, config.trainable)
    model.to(device)
    if data.shape is not None and device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    return model


def _check_positions(model: nn.Module, config: RunConfig, data: Prepared) -> None:
    """A tokenizer need not know how many positions its model has learnt."""
    parts = [part for part in (data.train, *data.evaluation.values()) if isinstance(part, EncodedTexts)]
    longest = max(int(part.lengths.max()) for part in parts)
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding) and name.endswith("position_embeddings") and table.num_embeddings < longest:
            raise ConfigurationError(
                f"--max-length {config.max_length}: the longest text has {longest} tokens, and --model {config.model} "
                f"has {table.num_embeddings} positions"
            )


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = trained[0].is_cuda
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused
        )
    return torch.optim.AdamW(trained, lr=config.lr, eps=config.adam_eps, weight_decay=config.weight_decay, fused=fused)
