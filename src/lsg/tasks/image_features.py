"""Features computed once: a model with a fixed front and encoded images in, their encoded features out."""

import torch
from torch import Tensor, nn

from lsg.tasks.encoded import EncodedFeatures, EncodedImages, Indices

MOST_BYTES = 4 << 30  # of all features of a run; beyond it they are computed batch by batch
_CHUNK = 128  # images at a time: the transform's maps take some megabytes each


def features_fit(front: nn.Module, parts: list[EncodedImages], dtype: torch.dtype) -> bool:
    """Whether memory is likely to have room for the features of all parts."""
    one = _features(front, parts[0], [0])
    return one.numel() * dtype.itemsize * sum(map(len, parts)) <= MOST_BYTES


def encode_features(front: nn.Module, images: EncodedImages, dtype: torch.dtype) -> EncodedFeatures:
    """dtype: that in which the layers behind the front compute, so that nothing is lost."""
    found: Tensor | None = None
    for start in range(0, len(images), _CHUNK):
        rows = range(start, min(start + _CHUNK, len(images)))
        part = _features(front, images, rows).to(dtype)
        if found is None:
            found = part.new_empty(len(images), *part.shape[1:])
        found[start : start + len(part)] = part
    assert found is not None
    return EncodedFeatures(found, images.labels)


@torch.no_grad()
def _features(front: nn.Module, images: EncodedImages, rows: Indices) -> Tensor:
    found: Tensor = front(images.__getitems__(rows)[0])
    return found
