"""How a run sees its images: a configuration in; whether it may ask for views, and the views of encoded images, out."""

from lsg.errors import ConfigurationError
from lsg.tasks.encoded import Encoded, EncodedImages
from lsg.tasks.image_views import ImageViews
from lsg.tasks.names import KINDS, check_task
from lsg.train.config import RunConfig

NATURAL = ("cifar10", "images")  # mirrored, they still show the same thing; digits and letters do not


def check_views(config: RunConfig) -> None:
    """Refuse views of texts."""
    check_task(config.task)
    if config.views > 1 and KINDS[config.task] != "image":
        raise ConfigurationError(f"--views {config.views}: only images have views, and --task {config.task} has texts")


def with_views(data: Encoded, config: RunConfig) -> Encoded | ImageViews:
    """What is trained on: the data themselves, or `config.views` views of each image."""
    if config.views == 1 or not isinstance(data, EncodedImages):  # features of views are views already
        return data
    return ImageViews(data, config.views, flip=config.task in NATURAL)
