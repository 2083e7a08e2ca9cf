"""Does padding change what a model says of a text? A text classifier in; one that depends on padding is refused.

Texts of a batch are padded to the longest of them. A model that looks at the padding would make a record's gradient
depend on the other records of its batch, and no clipping of single records would protect them.
"""

from typing import Any

import torch
import torch.nn.functional as F

from lsg.errors import ConfigurationError, first_line
from lsg.tasks.data import Texts
from lsg.tasks.encoded import WIDTH_STEP, encode_texts

_TOLERANCE = 1e-4  # of the largest logit: above the rounding of float32


@torch.no_grad()
def check_padding(model: Any, tokenizer: Any, width: int, name: str) -> None:
    """Compare a short text alone with the same text beside one of `width` tokens. Both are made up, and not data.

    model: on the CPU, where nothing is rounded to less than float32. name: of the model, for the error.
    """
    if width <= WIDTH_STEP:
        return  # all texts are padded alike
    text, device = Texts(["a " * width], None, torch.zeros(1, dtype=torch.long)), next(model.parameters()).device
    # Cut to this length, the short text needs no padding of its own.
    short, long = (encode_texts(text, tokenizer, length, device).__getitems__([0]) for length in (WIDTH_STEP, width))
    fill = {"input_ids": tokenizer.pad_token_id}
    padded = {
        key: F.pad(value, (0, long[key].shape[1] - value.shape[1]), value=fill.get(key, 0))
        for key, value in short.items()
        if key != "labels"
    }
    together = {key: torch.cat([value, long[key]]) for key, value in padded.items()}
    was_training = model.training
    model.eval()
    try:
        alone, beside = model(**{key: short[key] for key in padded}).logits[0], model(**together).logits[0]
    except Exception as error:  # of any model's code
        raise ConfigurationError(f"--model {name}: fails on a text of {width} tokens ({first_line(error)})") from error
    finally:
        model.train(was_training)
    if (alone - beside).abs().max() > _TOLERANCE * alone.abs().max():
        raise ConfigurationError(
            f"--model {name}: what it says of a text changes with the padding behind it, that is, with the length of "
            "other records in the batch, so that no record would be protected. Use another model"
        )
