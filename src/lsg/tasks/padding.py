"""Do the other texts of a batch change what a model says of a text? A classifier of texts, or of
their words, in; such a one is refused.

Texts of a batch are padded to the longest of them. A model that looks at the padding, or at the other texts themselves,
would make a record's gradient depend on the other records of its batch, and no clipping of single records would protect
them. Where a frozen encoder's features are computed once, nothing else looks at it.
"""

from typing import Any

import torch
import torch.nn.functional as F

from lsg.errors import ConfigurationError, first_line
from lsg.tasks.data import Texts
from lsg.tasks.encoded import encode_texts
from lsg.tasks.padded import WIDTH_STEP

_TOLERANCE = 1e-4  # of the largest logit: above the rounding of float32
_STRANGERS = 3  # texts of random tokens


@torch.no_grad()
def check_padding(model: Any, tokenizer: Any, width: int, name: str) -> None:
    """Compare a short text alone with the same text beside others of `width` tokens. All are made up, and not data.

    model: on the CPU, where nothing is rounded to less than float32. name: of the model, for the error.
    """
    text, device = Texts(["a " * width], None, torch.zeros(1, dtype=torch.long)), next(model.parameters()).device
    # Cut to this length, the short text needs no padding of its own.
    lengths = min(WIDTH_STEP, width), width
    short, long = (encode_texts(text, tokenizer, length, device).__getitems__([0]) for length in lengths)
    fill = {"input_ids": tokenizer.pad_token_id}
    padded = {
        key: F.pad(value, (0, long[key].shape[1] - value.shape[1]), value=fill.get(key, 0))
        for key, value in short.items()
        if key != "labels"
    }
    strangers = {key: long[key].repeat(_STRANGERS, 1) for key in padded}
    random = torch.Generator().manual_seed(0)
    strangers["input_ids"] = torch.randint(len(tokenizer), strangers["input_ids"].shape, generator=random).to(device)
    was_training = model.training
    model.eval()
    try:
        alone = model(**{key: short[key] for key in padded}).logits[0]
        beside, among = (  # where each token has logits, those of the padding do not count
            model(**{key: torch.cat([value, others[key]]) for key, value in padded.items()}).logits[0][: len(alone)]
            for others in (long, strangers)
        )
    except Exception as error:  # of any model's code
        raise ConfigurationError(f"--model {name}: fails on a text of {width} tokens ({first_line(error)})") from error
    finally:
        model.train(was_training)
    for other, cause in (
        (beside, "the padding behind it, that is, with the length of other records in the batch"),
        (among, "the other records in the batch"),
    ):
        if (alone - other).abs().max() > _TOLERANCE * alone.abs().max():
            raise ConfigurationError(
                f"--model {name}: what it says of a text changes with {cause}, so that no record would be protected. "
                "Use another model"
            )
