"""Documents for a language model: a configuration and the task's records in, the records encoded on a device out."""

from functools import partial
from typing import Any

import torch

from lsg.errors import ConfigurationError
from lsg.tasks.data import Documents, TaskData
from lsg.tasks.encoded import EncodedLanguage
from lsg.tasks.encoded_documents import encode_documents, encode_prompted
from lsg.tasks.language_models import language_config
from lsg.tasks.models import load_tokenizer
from lsg.train.config import RunConfig
from lsg.train.listener import Listener

LEAST = 2  # tokens: one to see and one to tell


def encode_language(
    config: RunConfig, data: TaskData, device: torch.device, listener: Listener
) -> tuple[dict[str, EncodedLanguage], Any]:
    """("train" and each part of the evaluation data, the tokenizer)"""
    model, tokenizer = language_config(config.model), load_tokenizer(config.model)
    _check_length(config, model, tokenizer)
    encoded: dict[str, EncodedLanguage] = {}
    for name, part in {"train": data.train, **data.evaluation}.items():
        assert isinstance(part, Documents)
        report = partial(listener.prepared, f"tokenizing {name}", total=len(part))
        if not model.is_encoder_decoder:
            encoded[name] = encode_documents(part, tokenizer, config.max_length, device, report)
            continue
        if part.prompts is None:
            raise ConfigurationError(
                f"--model {config.model}: a {model.model_type} model has an encoder, which reads a prompt: name its "
                "column with --prompt-column"
            )
        start = _decoder_start(config, model)
        encoded[name] = encode_prompted(part, tokenizer, config.max_length, start, device, report)
    for name, encoding in encoded.items():
        if encoding.unlearnt == len(encoding):
            raise ConfigurationError(
                f"{data.source}: prompts of its part '{name}' fill all of the {config.max_length} tokens of "
                "--max-length, and nothing of its texts is left: raise it"
            )
    return encoded, tokenizer


def _check_length(config: RunConfig, model: Any, tokenizer: Any) -> None:
    positions = getattr(model, "max_position_embeddings", None) or 0
    most = min(positions if positions > 0 else config.max_length, tokenizer.model_max_length)
    if not LEAST <= config.max_length <= most:
        wanted = f"can read {most} tokens: give it" if config.max_length > most else "needs"
        raise ConfigurationError(
            f"--max-length {config.max_length}: --model {config.model} {wanted} "
            f"{'so many or fewer' if config.max_length > most else f'at least {LEAST}'}"
        )


def _decoder_start(config: RunConfig, model: Any) -> int:
    """What the decoder sees where it is to tell the first token."""
    found = [model.decoder_start_token_id, getattr(model, "bos_token_id", None), getattr(model, "pad_token_id", None)]
    start = next((token for token in found if token is not None), None)
    if start is None:
        raise ConfigurationError(f"--model {config.model}: its configuration has no decoder_start_token_id")
    return int(start)
