"""A model's fixed front, computed once: a run's model and encoded images in, features in place of the images out."""

from dataclasses import replace

import torch
from torch import nn

from lsg.tasks.encoded import Encoded, EncodedImages
from lsg.tasks.image_features import encode_features, features_fit
from lsg.tasks.image_views import ImageViews
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.precision import choose_precision
from lsg.train.prepare_data import PreparedData
from lsg.train.prepare_images import with_views


def computed_once(config: RunConfig, data: PreparedData, model: nn.Module, listener: Listener) -> PreparedData:
    """The front is taken off the model, where it has one (`front`, which trains nothing and is not saved) and memory
    has room for all features. Views of images are drawn once then, and are the same at each step."""
    front = getattr(model, "front", None)
    if front is None:
        return data
    train = with_views(data.train, config)
    assert isinstance(train, EncodedImages | ImageViews) and isinstance(data.train, EncodedImages)
    count = len(train) * config.views + sum(map(len, data.evaluation.values()))
    lower = choose_precision(config.precision, data.train.pixels.device) == "bf16"
    dtype = torch.bfloat16 if lower else torch.float32
    if not features_fit(front, data.train, count, dtype):
        return data
    listener.note(f"{config.model}: computing the fixed features of {count:,} images, once")
    evaluation: dict[str, Encoded] = {}
    for name, part in data.evaluation.items():
        assert isinstance(part, EncodedImages)
        evaluation[name] = encode_features(front, part, dtype)
    encoded = replace(data, train=encode_features(front, train, dtype), evaluation=evaluation)
    model.front = nn.Identity()
    return encoded
