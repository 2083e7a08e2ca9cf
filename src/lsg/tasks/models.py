"""Models by name: a hub id, a local folder or a zoo name in, a classifier out; and a trained one back to disk.

Nothing that is loaded can run code: weights are safetensors, and a hub's own Python files are never executed.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lsg.errors import ConfigurationError, first_line
from lsg.files.foreign_files import read_text
from lsg.files.foreign_text import to_json
from lsg.files.foreign_values import json_value
from lsg.files.sign_of_life import doing
from lsg.layers.registry import rule_for
from lsg.models import scatter_cnn, scatter_linear, scatter_resnet, small_cnn, standardised_wrn, wrn28
from lsg.tasks.names import ZOO_NAMES
from lsg.tasks.pooled import PooledClassifier
from lsg.tasks.quiet_transformers import quiet_transformers

_ADAPTERS = "it holds adapters, and not a whole model: merge them into their model (--merge) and train that"


@dataclass(frozen=True)
class ImageShape:
    """What a zoo model must know of the data."""

    classes: int
    channels: int
    height: int
    width: int


def _small_cnn(name: str, width: int, shape: ImageShape) -> nn.Module:
    if shape.height != shape.width:
        raise ConfigurationError(
            f"--model {name} needs square images, and these are {shape.height} x {shape.width}: use wrn28-2"
        )
    return small_cnn(shape.classes, shape.channels, shape.height, width=width)


ZOO: dict[str, Callable[[ImageShape], nn.Module]] = {
    "wrn28-2": lambda shape: wrn28(2, shape.classes, shape.channels),
    "wrn28-4": lambda shape: wrn28(4, shape.classes, shape.channels),
    # De et al. 2022: for a large budget, with several views of each image.
    "wrn16-4": lambda shape: standardised_wrn(16, 4, shape.classes, shape.channels),
    "wrn16-2": lambda shape: standardised_wrn(16, 2, shape.classes, shape.channels),
    "wrn40-4": lambda shape: standardised_wrn(40, 4, shape.classes, shape.channels),
    # Tramèr and Boneh 2021: for a small budget.
    "scatter-linear": lambda shape: scatter_linear(shape.classes, shape.channels, shape.height, shape.width),
    "scatter-cnn": lambda shape: scatter_cnn(shape.classes, shape.channels, shape.height, shape.width),
    "scatter-resnet": lambda shape: scatter_resnet(shape.classes, shape.channels, shape.height, shape.width),
    "small-cnn": lambda shape: _small_cnn("small-cnn", 32, shape),
    # Wide enough for rank 8 to matter: on digits DPSGD noises 11 times as many numbers as LSG.
    "small-cnn-wide": lambda shape: _small_cnn("small-cnn-wide", 48, shape),
}
assert tuple(ZOO) == ZOO_NAMES


def check_model_kind(name: str, kind: str) -> None:
    """Zoo models are for a task of the kind "image", all others for texts."""
    if kind != "image" and name in ZOO:
        raise ConfigurationError(f"--model {name} is for images; a task of texts needs a hub id or a folder")
    if kind == "image" and name not in ZOO:
        raise ConfigurationError(f"--model '{name}' must be one of {', '.join(ZOO)} for a task of images")


def load_image_model(name: str, shape: ImageShape) -> nn.Module:
    """An untrained zoo model; its weights come from torch's global random stream."""
    check_model_kind(name, "image")
    return ZOO[name](shape)


def load_text_model(name: str, label_names: tuple[str, ...], *, of_words: bool = False) -> tuple[nn.Module, list[str]]:
    """A classifier of texts, or of each word of them, and the names of its parameters that are new, drawn from torch's
    global random stream."""
    with doing(f"loading {name}"), quiet_transformers():
        from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

        config = _labelled_config(name, label_names, of_words=of_words)
        kind = AutoModelForTokenClassification if of_words else AutoModelForSequenceClassification
        model, new = pretrained(kind, name, config)
    kept = sum(1 for key in model.base_model.state_dict() if f"{model.base_model_prefix}.{key}" not in new)
    if not kept:
        raise ConfigurationError(f"--model {name}: its weights fit none of a {type(model).__name__}'s encoder")
    return model, sorted(new)


def load_pooled_model(name: str, pooling: str, label_names: tuple[str, ...]) -> PooledClassifier:
    """The model's encoder under a linear head, whose weights are drawn from torch's global random stream."""
    with doing(f"loading {name}"), quiet_transformers():
        from transformers import AutoModel

        config = _labelled_config(name, label_names)
        if config.is_encoder_decoder:
            raise ConfigurationError(f"--pooling {pooling}: --model {name} has a decoder: use --pooling model")
        encoder, new = pretrained(AutoModel, name, config)
    if not encoder.state_dict().keys() - new:
        raise ConfigurationError(f"--model {name}: its weights fit none of a {type(encoder).__name__}")
    return PooledClassifier(encoder, pooling, label_names)


def _labelled_config(name: str, label_names: tuple[str, ...], *, of_words: bool = False) -> Any:
    config = text_config(name, of_words=of_words)
    config.num_labels = len(label_names)
    config.id2label = dict(enumerate(label_names))
    config.label2id = {label: number for number, label in config.id2label.items()}
    return config


def pretrained(kind: Any, name: str, config: Any) -> tuple[Any, set[str]]:
    """A model of this kind of transformers, and the names of its parameters that its files do not have."""
    try:
        model, info = kind.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # a head for another number of labels is replaced
            output_loading_info=True,
        )
    except Exception as error:  # of transformers, safetensors or the hub's client
        raise ConfigurationError(f"--model {name}: cannot load its weights ({first_line(error)})") from None
    if hasattr(model, "peft_config"):  # transformers follows them to a model elsewhere
        raise ConfigurationError(f"--model {name}: {_ADAPTERS}")
    return model, {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}


def text_config(name: str, *, of_words: bool = False) -> Any:
    """The model's configuration, refused where the architecture has no classifier of texts, or of words."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    )

    config = any_config(name)
    known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING if of_words else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in known:
        what, head = ("words", "token") if of_words else ("texts", "sequence")
        raise ConfigurationError(
            f"--model {name}: a {config.model_type} model cannot classify {what}: transformers has no {head} "
            "classification head for it"
        )
    return config


def any_config(name: str) -> Any:
    """The configuration of a model of transformers, of whatever architecture."""
    from transformers import AutoConfig

    check_model_kind(name, "text")
    _check_folder(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of transformers, safetensors or the hub's client
        raise ConfigurationError(
            f"--model {name}: cannot load its configuration ({_hub_or_folder(name)}{first_line(error)})"
        ) from None


def _hub_or_folder(name: str) -> str:
    return "" if Path(name).is_dir() else "no such folder here, and the hub: "


def _check_folder(name: str) -> None:
    folder = Path(name)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    inside = sorted(
        str(path.parent) for path in folder.glob("**/config.json") if (path.parent / "tokenizer.json").is_file()
    )
    hint = f"; did you mean {inside[0]}?" if inside else ""
    if (folder / "adapter_config.json").is_file():
        hint = f": {_ADAPTERS}"
    raise ConfigurationError(f"--model {name}: this folder has no config.json{hint}")


def load_tokenizer(name: str, *, of_words: bool = False) -> Any:
    """The model's own tokenizer, always with a token for padding. of_words: texts come as lists of words; a tokenizer
    of bytes puts a blank before each, as stands there in texts."""
    settings = {"add_prefix_space": True} if of_words else {}
    with doing(f"loading the tokenizer of {name}"), quiet_transformers():
        from transformers import AutoTokenizer

        _check_folder(name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **settings)
        except Exception as error:  # of transformers, tokenizers or the hub's client
            raise ConfigurationError(
                f"--model {name}: cannot load its tokenizer ({_hub_or_folder(name)}{first_line(error)})"
            ) from None
    if of_words:
        _put_blanks_before_words(tokenizer)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without one
        raise ConfigurationError(f"--model {name}: it has no tokenizer")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ConfigurationError(f"--model {name}: its tokenizer's model_max_length is no number")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ConfigurationError(f"--model {name}: its tokenizer has neither a padding nor an end token")
    return tokenizer


def _put_blanks_before_words(tokenizer: Any) -> None:
    """Also where the tokenizer's class does not heed add_prefix_space."""
    from tokenizers.pre_tokenizers import ByteLevel

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and isinstance(backend.pre_tokenizer, ByteLevel):
        backend.pre_tokenizer.add_prefix_space = True


def select_trained(model: nn.Module, trainable: str) -> None:
    """Set which parameters train; see RunConfig.trainable."""
    head = {id(p) for p in head_parameters(model)}
    weights = {id(p) for p in weight_matrices(model)}
    for parameter in model.parameters():
        in_head = id(parameter) in head
        parameter.requires_grad = {
            "all": True,
            "bias": in_head or parameter.ndim == 1,
            "head": in_head,
            "paper": in_head or id(parameter) in weights,
        }[trainable]


def head_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """What turns features into logits: all outside of a transformer's encoder, or a zoo model's `head`."""
    encoder_name = getattr(model, "base_model_prefix", None)
    if encoder_name is None:
        yield from model.get_submodule("head").parameters()
        return
    encoder = {id(p) for p in model.get_submodule(str(encoder_name)).parameters()}
    yield from (p for p in model.parameters() if id(p) not in encoder)


def weight_matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """Weights that can be projected, but for embedding tables."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for path in rule_for(module).layouts(module):
            parameter = operator.attrgetter(path)(module)
            if parameter is not None:
                yield parameter


def save_image_model(folder: Path, model: nn.Module, name: str, shape: ImageShape, about: dict[str, Any]) -> None:
    """`model.safetensors`, and `model.json` with what `load_trained_image_model` needs and what `about` adds."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(
        {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()},
        folder / "model.safetensors",
    )
    description = {"model": name, "shape": asdict(shape), **about}
    (folder / "model.json").write_text(to_json(description, indent=2) + "\n", encoding="utf-8")


def load_trained_image_model(folder: Path) -> nn.Module:
    """The inverse of `save_image_model`."""
    from safetensors.torch import load_file

    try:
        description = json_value(read_text(folder / "model.json"))
    except ValueError as error:
        raise ConfigurationError(f"{folder / 'model.json'} is damaged: {error}") from None
    model = load_image_model(description["model"], ImageShape(**description["shape"]))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def save_text_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """As transformers' `from_pretrained` reads it, or that of `PooledClassifier`."""
    with quiet_transformers():
        _forget_lengths(tokenizer)
        model.config.name_or_path = ""  # some versions of transformers write down where a model was read from
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _forget_lengths(tokenizer: Any) -> None:
    """Takes off the truncation and padding of the last call, which a tokenizer's file would keep.

    A length there would be that of the longest training text: a number about one record.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
