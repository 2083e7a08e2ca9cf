"""Does a language model see what it must not? One that looks ahead, at padding or at other texts is refused.

What it says of a record would depend on the other records of its batch, and no clipping of single records would protect
them; or it would be told the very token that it has to tell.
"""

from typing import Any

import torch
from torch import Tensor

from lsg.errors import ConfigurationError, first_line
from lsg.tasks.encoded import EncodedLanguage
from lsg.tasks.encoded_documents import EncodedPrompted
from lsg.tasks.padded import WIDTH_STEP

_TOLERANCE = 1e-4  # of the largest logit: above the rounding of float32
_STRANGERS = 3  # texts of random tokens
_LONGEST = 64  # of them, in tokens


@torch.no_grad()
def check_language_model(model: Any, data: EncodedLanguage, tokens: int, name: str) -> None:
    """Compare a text of random tokens alone with the same beside longer ones, and with what follows changed.

    model: on the CPU, where nothing is rounded to less than float32. data: its widths are used, not its records.
    tokens: how many the tokenizer knows. name: of the model, for the error.
    """
    if isinstance(data, EncodedPrompted):
        widths = {"input_ids": data.prompts.ids.shape[1], "decoder_input_ids": data.texts.ids.shape[1]}
    else:
        widths = {"input_ids": data.tokens.ids.shape[1]}
    inputs = [(key, min(width, _LONGEST)) for key, width in widths.items()]
    random = torch.Generator().manual_seed(0)
    batch = {key: torch.randint(tokens, (1 + _STRANGERS, width), generator=random) for key, width in inputs}
    mask = torch.ones_like(batch["input_ids"])
    lengths = {key: min(WIDTH_STEP, width) for key, width in inputs}
    mask[0, lengths["input_ids"] :] = 0  # the first text is short, and so padded
    short = {key: value[:1, : lengths[key]] for key, value in batch.items()}
    written = inputs[-1][0]
    others = {key: value.clone() for key, value in short.items()}
    others[written][:, -1] = (others[written][:, -1] + 1) % tokens
    was_training = model.training
    model.eval()
    try:
        alone = _logits(model, short, torch.ones_like(short["input_ids"]))
        beside = _logits(model, batch, mask)[:, : alone.shape[1]]
        ahead = _logits(model, others, torch.ones_like(short["input_ids"]))
    except Exception as error:  # of any model's code
        width = max(width for _, width in inputs)
        raise ConfigurationError(f"--model {name}: fails on texts of {width} tokens ({first_line(error)})") from error
    finally:
        model.train(was_training)
    if _differ(alone, beside):
        raise ConfigurationError(
            f"--model {name}: what it says of a text changes with the other records in the batch, or with the padding "
            "behind it, so that no record would be protected. Use another model"
        )
    if _differ(alone[:, :-1], ahead[:, :-1]):
        raise ConfigurationError(
            f"--model {name}: what it says of a token changes with the tokens that follow: it would learn to copy and "
            "not to write. Use a causal model, or one with an encoder and a decoder"
        )


def _logits(model: Any, inputs: dict[str, Tensor], mask: Tensor) -> Tensor:
    """Of the first text."""
    found: Tensor = model(**inputs, attention_mask=mask, use_cache=False).logits[:1]
    return found


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool(one.numel() and (one - other).abs().max() > _TOLERANCE * one.abs().max())
