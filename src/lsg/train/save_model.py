"""Writes a trained model with all that is needed to use it: a run's model, settings and data in, a folder out."""

from pathlib import Path

from torch import nn

from lsg.tasks.encoded import EncodedLanguage
from lsg.tasks.language_models import save_language_model
from lsg.tasks.models import save_image_model, save_text_model
from lsg.train.config import RunConfig
from lsg.train.prepare_data import DEFAULT_NORMALISATION, LOCAL, NORMALISATION, PreparedData


def save_trained(folder: Path, model: nn.Module, config: RunConfig, data: PreparedData) -> None:
    if isinstance(data.train, EncodedLanguage):
        base = None if data.model_name == LOCAL else data.model_name
        save_language_model(folder, model, data.tokenizer, base, merge=bool(config.merge))
    elif data.shape is None:
        save_text_model(folder, model, data.tokenizer)
    else:
        mean, deviation = NORMALISATION.get(config.task, DEFAULT_NORMALISATION)
        about = {
            "task": config.task,
            "label_names": list(data.label_names),
            # What the model was trained on is (pixel / 255 - mean) / deviation, channel by channel.
            "mean": mean,
            "deviation": deviation,
        }
        save_image_model(folder, model, config.model, data.shape, about)
