"""One plain training loop: a model, optimizer and loader made private by an engine in, one record per epoch out.

It prints nothing and knows no data set; `on_step` and `on_epoch` are where a progress bar or a logger listens.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.engine import PrivacyEngine
from lsg.errors import ConfigurationError
from lsg.loader import PrivateDataLoader
from lsg.optimizer import PrivateOptimizer

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Epoch:
    """What is known after an epoch.

    steps: logical steps with samples, from the start of training to here. An empty draw counts for epsilon alone.
    epsilon: spent from the start of training to here; infinite without noise.
    loss: mean over the samples that the epoch drew, NaN if it drew none. It is computed from the training data without
        noise, so it is not private: look at it, do not publish it with the model.
    score: what `evaluate` returned, or None without it.
    seconds: spent in training steps; neither evaluation nor accounting counts.
    """

    number: int
    steps: int
    epsilon: float
    loss: float
    score: float | None
    seconds: float


def classification_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross entropy of a batch (inputs, labels)."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def train(
    model: nn.Module,
    optimizer: PrivateOptimizer,
    loader: PrivateDataLoader,
    engine: PrivacyEngine,
    *,
    epochs: int,
    delta: float,
    loss: Loss = classification_loss,
    evaluate: Callable[[nn.Module], float] | None = None,
    on_step: Callable[[int], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    """Train for `epochs` epochs; returns their records, oldest first.

    loss: (model, batch) -> the mean loss of a batch, as `loss_reduction="mean"` of the engine expects.
    evaluate: called after each epoch with the model in eval mode and gradients off.
    on_step: called after each logical step that had samples, with their number so far.
    """
    if epochs < 1:
        raise ConfigurationError(f"epochs={epochs} must be at least 1")
    history: list[Epoch] = []
    steps = 0
    for number in range(1, epochs + 1):
        model.train()
        total = torch.zeros((), dtype=torch.float64)
        samples = 0
        started = time.perf_counter()
        for batch in loader:
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            size = len(batch[0]) if isinstance(batch, list | tuple) else len(next(iter(batch.values())))
            total += value.detach().double().cpu() * size
            samples += size
            if optimizer.stepped:
                steps += 1
                if on_step is not None:
                    on_step(steps)
        seconds = time.perf_counter() - started
        epoch = Epoch(
            number=number,
            steps=steps,
            epsilon=engine.get_epsilon(delta),
            loss=total.item() / samples if samples else math.nan,
            score=None if evaluate is None else _evaluated(model, evaluate),
            seconds=seconds,
        )
        history.append(epoch)
        if on_epoch is not None:
            on_epoch(epoch)
    return history


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Share of the inputs whose largest logit is their label's."""
    return (model(inputs).argmax(dim=1) == labels).double().mean().item()


def _evaluated(model: nn.Module, evaluate: Callable[[nn.Module], float]) -> float:
    model.eval()
    try:
        with torch.no_grad():
            return evaluate(model)
    finally:
        model.train()
