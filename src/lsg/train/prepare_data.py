"""What a run trains on: a configuration in, the task's data encoded on a device out."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lsg.errors import ConfigurationError
from lsg.files.foreign_text import is_text, visible
from lsg.files.sign_of_life import doing
from lsg.tasks.data import Documents, Images, Records, Tagged, TaskData, Texts
from lsg.tasks.encoded import Encoded, EncodedLanguage, encode_images, encode_texts
from lsg.tasks.encoded_tags import EncodedTags, encode_tags
from lsg.tasks.models import ImageShape, check_model_kind, load_tokenizer
from lsg.tasks.readers.files import local_path
from lsg.tasks.readers.progress import told_to
from lsg.tasks.split import HELD_OUT_PART, divide, how_divided
from lsg.train.check_language import check_language_options
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.prepare_documents import encode_language
from lsg.train.prepare_images import check_views
from lsg.train.prepare_tags import check_tagging_options, check_words
from lsg.train.protected import Protected, whom_it_protects

# Mean and deviation of each channel, as published; other images are brought to [-1, 1]. Never computed from the data at
# hand, which is private.
NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "digits": ((0.0,), (1.0,)),  # [0, 1], as `lsg demo` has them
}
DEFAULT_NORMALISATION = ((0.5,), (0.5,))
LOCAL = "local, not named here"
_NAMED = 10  # labels in the line about the data
_KEPT = 2  # data sets, encoded, for the next run of this process
_CACHE: dict[tuple[Any, ...], "PreparedData"] = {}


@dataclass(frozen=True)
class PreparedData:
    """Encoded data. source, used, columns: see `TaskData`. tokenizer: of texts; shape: of images; pairs: two texts a
    record, or a prompt and a text. persons: the id of the person that each training record is of, with --unit-column.

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
    columns: str = ""
    pairs: bool = False
    persons: list[str] | None = None

    def scored_apart(self, config: RunConfig) -> bool:
        """Whether evaluation data came as a part of their own, and were not held out of the data that are private."""
        return not config.validation and HELD_OUT_PART not in self.evaluation

    def protected(self, config: RunConfig) -> Protected:
        """Whom a run on these data protects."""
        return whom_it_protects(config, self.train, self.persons)


def prepare_data(
    config: RunConfig,
    device: torch.device,
    listener: Listener,
    *,
    only_tuning_part: bool = False,
    planted: tuple[str, ...] = (),
) -> PreparedData:
    """The task's data, with `tuning_part`, `train_limit` and `validation` applied.

    only_tuning_part: trains on the part that `tuning_part` leaves out otherwise, for `lsg tune`.
    planted: documents that are trained on beside the data's own, for `lsg audit`.
    """
    check_views(config)
    check_language_options(config)
    check_tagging_options(config)
    columns = (config.text_column, config.pair_column, config.prompt_column, config.label_column, config.unit_column)
    shares = (config.train_limit, config.validation, config.tuning_part, only_tuning_part)
    key = (config.task, config.data, columns, config.model, config.max_length, shares, planted, device)
    if key not in _CACHE:
        found = _divided(_read(config, listener), config, only_tuning_part)
        if planted:
            assert isinstance(found.train, Documents)
            found = replace(found, train=found.train.plus(planted))
        encoded = _encode(config, found, device, listener)
        while len(_CACHE) >= _KEPT:
            del _CACHE[next(iter(_CACHE))]
        _CACHE[key] = encoded
    data = _CACHE[key]
    _describe(config, data, listener)
    return data


def _describe(config: RunConfig, data: PreparedData, listener: Listener) -> None:
    sizes = ", ".join(f"{len(part):,} for {name}" for name, part in data.evaluation.items())
    labels = ", ".join(visible(name, 80) for name in data.label_names[:_NAMED])
    labels = f"; labels {labels}{', ...' if len(data.label_names) > _NAMED else ''}" if labels else ""
    counted = data.protected(config).counted
    about = f"; {data.columns}" * bool(data.columns) + labels
    cut = "" if data.tokenizer is None else f"; texts are cut at {config.max_length} tokens (--max-length)"
    unlearnt = data.train.unlearnt if isinstance(data.train, EncodedLanguage) else 0
    listener.note(f"{visible(data.source)}: {counted} for training, {sizes}{about}{cut}")
    if unlearnt:
        listener.note(f"{unlearnt:,} prompts leave no room for their texts, and teach nothing (not private)")
    unseen = data.train.unseen if isinstance(data.train, EncodedTags) else 0
    if unseen:
        listener.note(f"{unseen:,} words are cut off or have no token, and teach nothing (not private)")


def _read(config: RunConfig, listener: Listener) -> TaskData:
    from lsg.tasks.catalog import TASKS
    from lsg.tasks.names import check_task

    check_task(config.task)
    check_model_kind(config.model, TASKS[config.task].kind)  # before the data, which may take minutes
    with told_to(listener.prepared), doing("reading the data"):
        found = _loaded(config)
    for name in found.label_names:
        if not is_text(name):  # before training: the model's files name the classes
            raise ConfigurationError(f"{found.source}: the name of the class '{visible(name)}' is not UTF-8 text")
    return found


def _loaded(config: RunConfig) -> TaskData:
    from lsg.tasks.catalog import load_task

    return load_task(
        config.task,
        config.data,
        text_column=config.text_column,
        pair_column=config.pair_column,
        prompt_column=config.prompt_column,
        label_column=config.label_column,
        unit_column=config.unit_column,
    )


def _divided(data: TaskData, config: RunConfig, only_tuning_part: bool) -> TaskData:
    """With `validation` held out of the training records, and `train_limit` of the others kept."""
    train, evaluation, used = data.train, data.evaluation, [data.used] if data.used else []
    how = how_divided(train)
    if config.tuning_part:
        tuning, rest = divide(train, config.tuning_part, "tuning")
        train = tuning if only_tuning_part else rest
        which = "about" if only_tuning_part else "all but about"
        used.append(f"{which} {100 * config.tuning_part:g} %, set aside for tuning, {how}")
    if config.validation:
        validation, train = divide(train, config.validation, "validation")
        evaluation = {"validation": validation}
        used.append(f"all but about {100 * config.validation:g} %, held out for validation, {how}")
    if config.train_limit:
        train, _ = divide(train, config.train_limit, "train-limit")
        used.append(f"about {100 * config.train_limit:g} %, {how}")
    return replace(data, train=train, evaluation=evaluation, used="; of those ".join(used))


def _encode(config: RunConfig, data: TaskData, device: torch.device, listener: Listener) -> PreparedData:
    for name, part in {"train": data.train, **data.evaluation}.items():
        if not len(part):
            raise ConfigurationError(f"{data.source}: its part '{name}' has no records")
    is_local = config.data is not None and local_path(config.data) is not None
    common: dict[str, Any] = {
        "label_names": data.label_names,
        "source": data.source,
        "used": data.used,
        "columns": data.columns,
        "data_name": LOCAL if is_local else data.source,
        "model_name": LOCAL if Path(config.model).exists() else config.model,
    }
    if isinstance(data.train, Images):
        return _encode_images(config, data, device, common)
    if isinstance(data.train, Documents):
        language, tokenizer = encode_language(config, data, device, listener)
        common |= {"tokenizer": tokenizer, "pairs": data.train.prompts is not None, "persons": data.train.persons}
        return PreparedData(language.pop("train"), {**language}, **common)
    return _encode_texts(config, data, device, listener, common)


def _encode_images(config: RunConfig, data: TaskData, device: torch.device, common: dict[str, Any]) -> PreparedData:
    train = _images(data.train)
    size = tuple(train.pixels.shape[1:])
    for name, part in data.evaluation.items():
        other = tuple(_images(part).pixels.shape[1:])
        if other != size:
            raise ConfigurationError(
                f"{data.source}: images of its part '{name}' have channels, height and width {other}, those for "
                f"training {size}"
            )
    mean, deviation = NORMALISATION.get(config.task, DEFAULT_NORMALISATION)
    evaluation: dict[str, Encoded] = {
        name: encode_images(_images(part), mean, deviation, device) for name, part in data.evaluation.items()
    }
    shape = ImageShape(len(data.label_names), *size)
    return PreparedData(encode_images(train, mean, deviation, device), evaluation, shape=shape, **common)


def _encode_texts(
    config: RunConfig, data: TaskData, device: torch.device, listener: Listener, common: dict[str, Any]
) -> PreparedData:
    train = data.train
    tokenizer = load_tokenizer(config.model, of_words=isinstance(train, Tagged))
    if config.max_length > tokenizer.model_max_length:
        raise ConfigurationError(
            f"--max-length {config.max_length} is more than the {tokenizer.model_max_length} tokens that --model "
            f"{config.model} can read"
        )
    pairs = isinstance(train, Texts) and train.pairs is not None
    least = tokenizer.num_special_tokens_to_add(pair=pairs) + 1
    if config.max_length < least:
        raise ConfigurationError(f"--max-length {config.max_length}: --model {config.model} needs at least {least}")
    encoded: dict[str, Encoded] = {}
    for name, part in {"train": train, **data.evaluation}.items():
        report = partial(listener.prepared, f"tokenizing {name}", total=len(part))
        if isinstance(part, Tagged):
            encoded[name] = encode_tags(part, tokenizer, config.max_length, device, report)
        else:
            encoded[name] = encode_texts(_texts(part), tokenizer, config.max_length, device, report)
    check_words(config, data.source, encoded)
    assert isinstance(train, Tagged | Texts)
    common |= {"tokenizer": tokenizer, "pairs": pairs, "persons": train.persons}
    return PreparedData(encoded.pop("train"), encoded, **common)


def _images(part: Records) -> Images:
    assert isinstance(part, Images)
    return part


def _texts(part: Records) -> Texts:
    assert isinstance(part, Texts)
    return part
