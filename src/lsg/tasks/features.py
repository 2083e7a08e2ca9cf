"""Features of a frozen encoder, computed once: a classifier and encoded texts in, one vector a text out.

Where the head alone is trained, every epoch would compute the same features again. A text's features depend on that
text alone, so training on them protects each record as training on the texts would. To the bit: a batch has as many
rows and columns as the text's own length asks for, whatever other texts there are, since a GPU may round otherwise in
a batch of another shape.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lsg.tasks.encoded import EncodedFeatures, EncodedTexts
from lsg.tasks.padded import WIDTH_STEP
from lsg.tasks.pooled import PooledClassifier

_TEXTS = {"cpu": 32, "cuda": 256}  # computed at once


@torch.no_grad()
def compute_features(
    model: PooledClassifier,
    texts: EncodedTexts,
    autocast: Callable[[], AbstractContextManager[Any]],
    report: Callable[[int], None],
) -> EncodedFeatures:
    """In eval mode: without dropout. report: called with the number of texts done."""
    device = texts.labels.device
    features = torch.empty(len(texts), model.head.in_features, device=device)
    was_training = model.training
    model.eval()
    done, size = 0, _TEXTS.get(device.type, 256)
    try:
        for rows in _alike(texts.lengths, size):
            filled = torch.cat([rows, rows[:1].expand(size - len(rows))])
            batch = {key: value for key, value in texts.__getitems__(filled).items() if key != "labels"}
            with autocast():
                features[rows.to(device)] = model.features(**batch)[: len(rows)]
            done += len(rows)
            report(done)
    finally:
        model.train(was_training)
    return EncodedFeatures(features, texts.labels)


def _alike(lengths: Tensor, size: int) -> Iterator[Tensor]:
    """Rows of texts that are padded to the same width, at most `size` at a time."""
    widths = lengths.add(WIDTH_STEP - 1).div(WIDTH_STEP, rounding_mode="floor")
    for width in widths.unique():
        yield from (widths == width).nonzero().flatten().split(size)
