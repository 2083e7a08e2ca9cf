"""Features computed once: a model's fixed front and encoded images in, their encoded features out."""

import torch
from torch import Tensor, nn

from lsg.tasks.encoded import EncodedFeatures, EncodedImages
from lsg.tasks.image_views import ImageViews
from lsg.tasks.padded import Indices

MOST_BYTES = 4 << 30  # on a CPU, of all features of a run; a GPU gives half of its free memory
_CHUNK = 128  # images at a time: the transform's maps take some megabytes each


def features_fit(front: nn.Module, images: EncodedImages, count: int, dtype: torch.dtype) -> bool:
    """Whether memory is likely to have room for the features of so many images like these."""
    device = images.pixels.device
    most = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else MOST_BYTES
    return _features(front, images, [0]).numel() * dtype.itemsize * count <= most


def encode_features(front: nn.Module, data: EncodedImages | ImageViews, dtype: torch.dtype) -> EncodedFeatures:
    """dtype: that in which the layers behind the front compute, so that nothing is lost."""
    images, views = (data.images, data.views) if isinstance(data, ImageViews) else (data, 1)
    found: Tensor | None = None
    records = max(1, _CHUNK // views)
    for start in range(0, len(data), records):
        part = _features(front, data, range(start, min(start + records, len(data)))).to(dtype)
        if found is None:
            found = part.new_empty(len(data) * views, *part.shape[1:])
        found[start * views : start * views + len(part)] = part
    assert found is not None
    return EncodedFeatures(found, images.labels, views)


@torch.no_grad()
def _features(front: nn.Module, data: EncodedImages | ImageViews, records: Indices) -> Tensor:
    found: Tensor = front(data.__getitems__(records)[0])
    return found
