"""Does a language model see what it must not? One that looks ahead, at padding or at other texts is refused.

What it says of a record would depend on the other records of its batch, and no clipping of single records would protect
them; or it would be told the very token that it has to tell. Some look at the width of a batch alone, and only beyond
some width: positions that are scaled anew there ("dynamic" and "longrope" ones), attention that becomes sparse.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lsg.errors import ConfigurationError, first_line
from lsg.tasks.encoded import EncodedLanguage
from lsg.tasks.encoded_documents import EncodedPrompted
from lsg.tasks.padded import WIDTH_STEP

_TOLERANCE = 1e-4  # of the largest logit: above the rounding of float32
_STRANGERS = 3  # texts of random tokens
_LONGEST = 64  # of them, in tokens


@torch.no_grad()
def check_language_model(model: Any, data: EncodedLanguage, most: int, tokens: int, name: str) -> None:
    """Compare a text of random tokens alone with the same beside longer ones, in the widest batch, and with what
    follows changed.

    model: on the CPU, where nothing is rounded to less than float32. data: what kind of inputs it has; no records are
    looked at. most: tokens of a record at most, and so of the widest batch that there can be. tokens: how many the
    tokenizer knows. name: of the model, for the error.
    """
    keys = ("input_ids", "decoder_input_ids") if isinstance(data, EncodedPrompted) else ("input_ids",)
    inputs = [(key, min(most, _LONGEST)) for key in keys]
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
        wide = {key: F.pad(value, (0, most - value.shape[1])) for key, value in short.items()}
        in_widest = _logits(model, wide, F.pad(mask[:1], (0, most - mask.shape[1])))[:, : alone.shape[1]]
    except Exception as error:  # of any model's code
        raise ConfigurationError(
            f"--model {name}: fails on texts of {most} tokens, the --max-length ({first_line(error)})"
        ) from error
    finally:
        model.train(was_training)
    if _differ(alone, beside):
        raise ConfigurationError(
            f"--model {name}: what it says of a text changes with the other records in the batch, or with the padding "
            "behind it, so that no record would be protected. Use another model"
        )
    if _differ(alone, in_widest):
        raise ConfigurationError(
            f"--model {name}: what it says of a text changes in a batch of {most} tokens, and so with the lengths of "
            "the other records, so that no record would be protected. Use another model, or a smaller --max-length: "
            "that which its positions were pretrained with, if they are scaled beyond it"
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
