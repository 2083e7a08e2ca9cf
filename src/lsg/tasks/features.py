"""Features of a frozen encoder, computed once: a classifier and encoded texts in, one vector a text out.

Where the head alone is trained, every epoch would compute the same features again. A text's features depend on that
text alone, so training on them protects each record as training on the texts would.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lsg.tasks.encoded import EncodedFeatures, EncodedTexts
from lsg.tasks.pooled import PooledClassifier

_TEXTS, _TOKENS = 256, 8192  # computed at once


@torch.no_grad()
def compute_features(
    model: PooledClassifier,
    texts: EncodedTexts,
    autocast: Callable[[], AbstractContextManager[Any]],
    report: Callable[[int], None],
) -> EncodedFeatures:
    """In eval mode: without dropout. report: called with the number of texts done."""
    order = texts.lengths.argsort(stable=True)
    features = torch.empty(len(texts), model.head.in_features, device=texts.labels.device)
    was_training = model.training
    model.eval()
    done = 0
    try:
        while done < len(order):
            rows = order[done : done + _TEXTS]
            rows = rows[: max(1, _TOKENS // int(texts.lengths[rows[-1]]))]  # the last one is the longest
            batch = {key: value for key, value in texts.__getitems__(rows).items() if key != "labels"}
            with autocast():
                features[rows.to(features.device)] = model.features(**batch)
            done += len(rows)
            report(done)
    finally:
        model.train(was_training)
    return EncodedFeatures(features, texts.labels)
