"""Handwritten digits: nothing in, scikit-learn's bundled 8x8 images out, split for training and testing."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lsg.extras import needs_extra
from lsg.tasks.names import TEST_IMAGES, TRAIN_IMAGES

__all__ = ["TEST_IMAGES", "TRAIN_IMAGES", "Digits", "digits"]

SPLIT_SEED = 0  # the split is the task's, the same for every --seed


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) in [0, 1] and labels (n,), split by class proportions."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@lru_cache(maxsize=1)
def digits() -> Digits:
    """The data, always split in the same way. They never change, so that the training part is a constant list."""
    with needs_extra("train", "the task digits"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    bundle = load_digits()
    images = (bundle.images / 16.0).astype("float32")[:, None]
    parts = train_test_split(
        images, bundle.target, test_size=TEST_IMAGES, stratify=bundle.target, random_state=SPLIT_SEED
    )
    train_images, test_images, train_labels, test_labels = (torch.as_tensor(part) for part in parts)
    return Digits(train_images, train_labels, test_images, test_labels)
