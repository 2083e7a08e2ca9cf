"""Data sets by hub name, through the `datasets` library: tables of texts, and images.

Version 4 and later of that library read data files only and run no code of the data set's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lsg.errors import ConfigurationError, first_line
from lsg.files.foreign_text import listed
from lsg.files.sign_of_life import doing
from lsg.tasks.data import Images
from lsg.tasks.readers.columns import Wanted
from lsg.tasks.readers.pixels import labelled_images
from lsg.tasks.readers.tables import Table, store_of

INSTALL = "pip install 'datasets>=4' or 'lsg-dp[transformers]' (--data names local data)"
Splits = Mapping[str, Any]  # name -> datasets.Dataset


def load_hub(name: str, config: str | None = None) -> Splits:
    """name: as --data gave it, or as the task knows it."""
    try:
        import datasets
    except ImportError:
        raise ConfigurationError(f"{name} is no local path, and the hub needs datasets: {INSTALL}") from None
    if int(datasets.__version__.split(".")[0]) < 4:
        raise ConfigurationError(f"{name}: datasets {datasets.__version__} can run code from the hub: {INSTALL}")
    try:
        with doing(f"asking the hub for {name}"):
            return datasets.load_dataset(name, config)
    except Exception as error:  # of many kinds: the network's, the hub's, the file formats'
        raise ConfigurationError(f"{name} is no local path, and the hub refused it: {first_line(error)}") from None


def hub_table(splits: Splits, split: str, source: str, wanted: Wanted) -> Table:
    """Classes that have names are given by name, all others as they are."""
    dataset = _split(splits, split, source)
    columns = wanted.among(list(dataset.column_names), f"{source} {split}")
    values: dict[str, Any] = {name: list(dataset[name]) for name in columns.names}
    label = columns.label
    if label is not None:
        feature = dataset.features[label]
        names = getattr(getattr(feature, "feature", feature), "names", None)  # of what a list holds
        if names is not None:
            values[label] = [_named(value, names) for value in values[label]]
    values = {name: store_of(columns, name)(found) for name, found in values.items()}
    return Table(f"{source} {split}", columns, values, range(1, len(dataset) + 1), unit="row")


def _named(value: Any, names: Sequence[str]) -> Any:
    """A class's name, or a list of them. An unlabelled record has class -1."""
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    return names[value] if value is not None and 0 <= value < len(names) else value


def hub_images(splits: Splits, split: str, source: str, image_column: str, classes: int) -> Images:
    dataset, place = _split(splits, split, source), f"{source} {split}"
    for column in (image_column, "label"):
        if column not in dataset.column_names:
            raise ConfigurationError(f"{place}: no column '{column}'; it has {listed(dataset.column_names)}")
    if not len(dataset):
        raise ConfigurationError(f"{place}: no rows")
    pixels = []
    for row, image in enumerate(dataset[image_column], 1):
        array = np.asarray(image)
        pixels.append(array if array.ndim == 3 else array[..., None])
        if pixels[-1].shape != pixels[0].shape or array.dtype != np.uint8:
            raise ConfigurationError(
                f"{place}, row {row}: an image of {array.shape} {array.dtype}, and the first one's is {pixels[0].shape}"
            )
    labels = np.asarray(list(dataset["label"]), dtype=np.int64)
    return labelled_images(np.stack(pixels).transpose(0, 3, 1, 2), labels, classes, place, "row")


def _split(splits: Splits, split: str, source: str) -> Any:
    if split not in splits:
        raise ConfigurationError(f"{source}: no split '{split}'; it has {listed(splits)}")
    return splits[split]
