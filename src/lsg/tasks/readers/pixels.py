"""Arrays of images and labels, from any format, come in; checked tensors come out."""

import numpy as np
import torch
from numpy.typing import NDArray

from lsg.errors import ConfigurationError
from lsg.tasks.data import Images


def labelled_images(
    pixels: NDArray[np.uint8], labels: NDArray[np.integer], classes: int, source: str, unit: str
) -> Images:
    """pixels (n, channels, height, width). source and unit say in errors where a label was found."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise ConfigurationError(
            f"{source}, {unit} {wrong[0] + 1}: label {labels[wrong[0]]} is not between 0 and {classes - 1}"
        )
    # Copies: a tensor needs memory that it may write to, laid out in order.
    return Images(torch.from_numpy(pixels.copy(order="C")), torch.from_numpy(labels.astype(np.int64)))
