"""Names of tasks, models and poolings, for options and messages of commands: nothing here waits for PyTorch to load.

What they name stands in `catalog.py`, `models.py` and `pooled.py`, which check that their names are these.
"""

import difflib
from typing import Literal

from lsg.errors import ConfigurationError

Kind = Literal["text", "tokens", "image", "generate"]
KINDS: dict[str, Kind] = {
    "sst2": "text",
    "qnli": "text",
    "qqp": "text",
    "mnli": "text",
    "text": "text",
    "tokens": "tokens",
    "generate": "generate",
    "cifar10": "image",
    "fashion-mnist": "image",
    "digits": "image",
    "images": "image",
}
ZOO_NAMES = (
    *("wrn28-2", "wrn28-4", "wrn16-4", "wrn16-2", "wrn40-4"),
    *("scatter-linear", "scatter-cnn", "scatter-resnet", "small-cnn", "small-cnn-wide"),
)
POOLINGS = ("mean", "first")
TEST_IMAGES = 360  # of the 1,797 of scikit-learn's digits
TRAIN_IMAGES = 1797 - TEST_IMAGES


def check_task(task: str) -> None:
    """Refuse what is not in the catalog."""
    if task not in KINDS:
        close = difflib.get_close_matches(task.lower(), KINDS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigurationError(f"--task '{task}' is not known{hint}; it must be one of {', '.join(KINDS)}")
