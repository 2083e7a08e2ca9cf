"""A model's fixed front, computed once: a run's model and encoded images in, features in place of the images out."""

from dataclasses import replace

import torch
from torch import nn

from lsg.tasks.encoded import Encoded, EncodedImages
from lsg.tasks.image_features import encode_features, features_fit
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.precision import choose_precision
from lsg.train.prepare_data import PreparedData


def computed_once(config: RunConfig, data: PreparedData, model: nn.Module, listener: Listener) -> PreparedData:
    """The front is taken off the model, where it has one (`front`, which trains nothing and is not saved) and every
    image is seen as it is: its features are the same at each step. Otherwise nothing changes."""
    front = getattr(model, "front", None)
    if front is None or config.views > 1:
        return data
    parts = {"train": data.train, **data.evaluation}
    images = {name: part for name, part in parts.items() if isinstance(part, EncodedImages)}
    assert images.keys() == parts.keys()
    lower = choose_precision(config.precision, data.train.labels.device) == "bf16"
    dtype = torch.bfloat16 if lower else torch.float32
    if not features_fit(front, list(images.values()), dtype):
        return data
    listener.note(f"{config.model}: computing the fixed features of {sum(map(len, images.values())):,} images, once")
    encoded: dict[str, Encoded] = {name: encode_features(front, part, dtype) for name, part in images.items()}
    model.front = nn.Identity()
    return replace(data, train=encoded.pop("train"), evaluation=encoded)
