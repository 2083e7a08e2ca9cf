"""What training does not change is computed once: a model and its data in, the part that trains and its inputs out."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from lsg.tasks.encoded import Encoded, EncodedTexts
from lsg.tasks.features import compute_features
from lsg.tasks.pooled import PooledClassifier
from lsg.train.config import RunConfig
from lsg.train.fixed_front import computed_once
from lsg.train.listener import Listener
from lsg.train.precision import autocast, choose_precision
from lsg.train.prepare_data import PreparedData


def features_once(
    config: RunConfig, data: PreparedData, model: nn.Module, device: torch.device, listener: Listener
) -> tuple[nn.Module, PreparedData]:
    """The module to train, and data that it takes: features where a frozen encoder or a fixed front makes them."""
    if config.trainable == "head" and isinstance(model, PooledClassifier):
        return model.head, _texts_encoded(config, data, model, device, listener)
    return model, computed_once(config, data, model, listener)


def _texts_encoded(
    config: RunConfig, data: PreparedData, model: PooledClassifier, device: torch.device, listener: Listener
) -> PreparedData:
    """One pass of the encoder over all records, in place of one an epoch."""
    cast = partial(autocast, choose_precision(config.precision, device), device)
    parts: dict[str, Encoded] = {}
    for name, part in {"train": data.train, **data.evaluation}.items():
        assert isinstance(part, EncodedTexts)
        report = partial(listener.prepared, f"features of {name}", total=len(part))
        parts[name] = compute_features(model, part, cast, report)
    return replace(data, train=parts.pop("train"), evaluation=parts)
