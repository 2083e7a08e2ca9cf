"""Trains the digits' small CNN from scratch by any method.

The defaults of `Settings` are shared by all private methods. They were picked on a validation part of the training
images, for the best *mean* accuracy of LSG, RGP and DPSGD over the same settings, not for any one of them. That search
is not part of the epsilon reported; on private data it would have to be.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lsg.engine import PrivacyEngine
from lsg.errors import ConfigurationError
from lsg.explain import explain
from lsg.methods import Method, NonPrivate
from lsg.tasks.digits import TEST_IMAGES, TRAIN_IMAGES, digits, digits_model
from lsg.train.loop import Epoch, accuracy, train

MOMENTUM = 0.9
# Unclipped gradients are larger: the private methods' rate is too high here. The best of 0.02, 0.05 and 0.1.
NON_PRIVATE_LR = 0.05
# Fastest for DPSGD, whose larger per-sample gradients are paged in and out at each step. No accuracy depends on it.
MICRO_BATCH = 32


@dataclass(frozen=True)
class Settings:
    """How to train, whatever the method. `lr` is that of the private ones; see NON_PRIVATE_LR."""

    epsilon: float = 3.0
    delta: float = 1e-4
    epochs: int = 40
    batch_size: int = 512
    max_grad_norm: float = 1.0
    lr: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epsilon", "max_grad_norm", "lr"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{name}={value:g} must be positive and finite")
        if not 0 < self.delta < 1 / TRAIN_IMAGES:
            raise ConfigurationError(
                f"delta={self.delta:g} must be above 0 and below 1/N = {1 / TRAIN_IMAGES:.3g} (N = {TRAIN_IMAGES} "
                "training images): a larger one allows publishing a record outright"
            )
        if self.epochs < 1:
            raise ConfigurationError(f"epochs={self.epochs} must be at least 1")
        if not 1 <= self.batch_size <= TRAIN_IMAGES:
            raise ConfigurationError(f"batch_size={self.batch_size} must lie between 1 and {TRAIN_IMAGES}")
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"seed={self.seed} must lie between 0 and 2^63 - 1")


@dataclass(frozen=True)
class Run:
    """One method's training. `accuracy` is the last epoch's, not the best one's: that would be picked on test data."""

    method: str
    lr: float
    noise_dimensions: int  # numbers that get noise in each step
    noise_multiplier: float
    history: tuple[Epoch, ...]

    @property
    def epsilon(self) -> float:
        return self.history[-1].epsilon

    @property
    def curve(self) -> list[float]:
        """Test accuracy after each epoch."""
        return [epoch.score for epoch in self.history if epoch.score is not None]

    @property
    def accuracy(self) -> float:
        return self.curve[-1]

    @property
    def standard_error(self) -> float:
        """Of the accuracy, from the number of test images alone (binomial)."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / TEST_IMAGES)

    @property
    def seconds(self) -> float:
        return sum(epoch.seconds for epoch in self.history)


def train_digits(method: Method, settings: Settings, on_epoch: Callable[[Epoch], None] | None = None) -> Run:
    """Train from scratch with one method. At one seed every method starts from the same weights.

    The noise is seeded too, which makes a run repeatable and would, on secret data, make its noise guessable.
    """
    data = digits()
    torch.manual_seed(settings.seed)
    model = digits_model()
    private = not isinstance(method, NonPrivate)
    lr = settings.lr if private else NON_PRIVATE_LR
    noise_dimensions = explain(model, method).dimensions_after if private else 0
    engine = PrivacyEngine()
    inputs: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM),
        "data_loader": DataLoader(TensorDataset(data.train_images, data.train_labels), batch_size=settings.batch_size),
        "max_grad_norm": settings.max_grad_norm,
        "method": method,
        "max_physical_batch_size": MICRO_BATCH,
        "noise_generator": torch.Generator().manual_seed(settings.seed),
    }
    if private:
        model, optimizer, loader = engine.make_private_with_epsilon(
            **inputs, target_epsilon=settings.epsilon, target_delta=settings.delta, epochs=settings.epochs
        )
    else:
        model, optimizer, loader = engine.make_private(**inputs, noise_multiplier=0.0)
    history = train(
        model,
        optimizer,
        loader,
        engine,
        epochs=settings.epochs,
        delta=settings.delta,
        evaluate=lambda trained: accuracy(trained, data.test_images, data.test_labels),
        on_epoch=on_epoch,
    )
    engine.detach()
    return Run(str(method), lr, noise_dimensions, optimizer.noise_multiplier, tuple(history))
