"""The training loop: a model, optimizer and loader made private by an engine in, one record per epoch out.

It prints nothing and knows no data set; `on_step` and `on_epoch` are where a progress bar or a logger listens.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.engine import PrivacyEngine
from lsg.errors import BudgetExceeded, ConfigurationError
from lsg.model.inputs import batch_size
from lsg.sampling.loader import PrivateDataLoader
from lsg.step.optimizer import PrivateOptimizer
from lsg.step.out_of_memory import BackwardInPieces, Loss
from lsg.train.epoch_signals import EpochSignals, SignalSums


@dataclass(frozen=True)
class Epoch:
    """What is known after an epoch.

    steps: logical steps with samples, from the start of training to here. An empty draw counts for epsilon alone.
    epsilon: spent from the start of training to here; infinite without noise.
    loss: mean over the samples that the epoch drew, NaN if it drew none. It is computed from the training data without
        noise, so it is not private: look at it, do not publish it with the model.
    score: what `evaluate` returned, or None without it.
    seconds: spent in training steps; neither evaluation nor accounting counts.
    samples: that the epoch drew. lr: the learning rate of the epoch's last step.
    signals: means over the epoch's steps, not private either; None without privacy or samples.
    """

    number: int
    steps: int
    epsilon: float
    loss: float
    score: float | None
    seconds: float
    samples: int
    lr: float
    signals: EpochSignals | None = None


@dataclass(frozen=True)
class LoopState:
    """Where a loop stands, for going on later: whole epochs, all steps, and what the epoch in progress has summed up.

    Plain numbers, which a JSON file keeps exactly. What else a continuation needs is the engine's state. loss and
    samples are of this process, where several train together.
    """

    epochs: int = 0
    steps: int = 0
    loss: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    lr: float = 0.0
    signals: dict[str, Any] = field(default_factory=dict)


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
    start: LoopState | None = None,
    save: Callable[[LoopState], None] | None = None,
    save_every: int = 0,
    end_at_budget: bool = False,
) -> list[Epoch]:
    """Train until `epochs` epochs are done; returns the records of those trained here, oldest first.

    Several processes call this alike: each trains on its share, and the records are of all of them together.

    A micro-batch that does not fit into memory is tried again in smaller pieces (`lsg.step.out_of_memory`).
    loss: (model, batch) -> the mean loss of a batch, as `loss_reduction="mean"` of the engine expects.
    evaluate: called after each epoch with the model in eval mode and gradients off.
    on_step: called after each logical step that had samples, with their number so far: on every process, also where
        this one had none of them.
    start: where to go on; the engine's state must be the one of that moment.
    save: called after each epoch, and within one after every `save_every` steps (0: never), with where the loop stands.
    end_at_budget: end early, with what was trained so far, at a step that would pass the target ε.
    """
    if epochs < 1:
        raise ConfigurationError(f"epochs={epochs} must be at least 1")
    history: list[Epoch] = []
    now = start or LoopState()
    backward = BackwardInPieces(model, optimizer, loss)
    while now.epochs < epochs:
        end, spent = _rest_of_epoch(
            model, optimizer, loader, now, backward=backward, on_step=on_step, save=save, save_every=save_every
        )
        if spent is not None and not end_at_budget:
            raise spent
        epoch = _of_all(end, engine, delta, None if evaluate is None else evaluated(model, evaluate))
        history.append(epoch)
        if on_epoch is not None:
            on_epoch(epoch)
        if spent is not None:
            break
        now = LoopState(end.epochs + 1, end.steps, lr=end.lr)
        if save is not None:
            save(now)
    return history


def _of_all(end: LoopState, engine: PrivacyEngine, delta: float, score: float | None) -> Epoch:
    """The record of an epoch, with the loss and the samples of all processes."""
    shares = engine.run.group.everyones((end.loss, end.samples))
    loss, samples = sum(loss for loss, _ in shares), sum(samples for _, samples in shares)
    return Epoch(
        number=end.epochs + 1,
        steps=end.steps,
        epsilon=engine.get_epsilon(delta),
        loss=loss / samples if samples else math.nan,
        score=score,
        seconds=end.seconds,
        samples=samples,
        lr=end.lr,
        signals=SignalSums(**end.signals).mean(),
    )


def _rest_of_epoch(
    model: nn.Module,
    optimizer: PrivateOptimizer,
    loader: PrivateDataLoader,
    now: LoopState,
    *,
    backward: BackwardInPieces,
    on_step: Callable[[int], None] | None,
    save: Callable[[LoopState], None] | None,
    save_every: int,
) -> tuple[LoopState, BudgetExceeded | None]:
    """Train to the end of the epoch in progress; it still counts as in progress there, with its sums complete. Where
    the budget ended it, what said so."""
    model.train()
    steps, samples, lr, signals = now.steps, now.samples, now.lr, SignalSums(**now.signals)
    total: Tensor | float = now.loss  # on the model's device: nothing waits for it before the epoch ends
    started = time.perf_counter() - now.seconds

    def stands() -> LoopState:
        whole = float(total)  # waits for the device
        return LoopState(now.epochs, steps, whole, samples, time.perf_counter() - started, lr, signals.read())

    def stepped() -> None:
        nonlocal steps, signals, started
        if optimizer.clock.batch.drawn == 0:
            return
        steps += 1
        signals = signals.plus(optimizer.signals)
        if on_step is not None:
            on_step(steps)
        if save is not None and save_every and steps % save_every == 0:
            state = stands()
            save(state)
            started = time.perf_counter() - state.seconds  # saving is not training

    unfollow = optimizer.on_logical_step(stepped)
    spent = None
    try:
        for batch in loader:
            value = backward(batch)
            lr = optimizer.param_groups[0]["lr"]
            size = batch_size(batch) or 0
            total = total + value.double() * size
            samples += size
            optimizer.step()
            optimizer.zero_grad()
    except BudgetExceeded as error:
        spent = error
    finally:
        unfollow()
    return stands(), spent


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Share of the inputs whose largest logit is their label's."""
    return (model(inputs).argmax(dim=1) == labels).double().mean().item()


def evaluated(model: nn.Module, evaluate: Callable[[nn.Module], float]) -> float:
    """With the model in eval mode and gradients off."""
    model.eval()
    try:
        with torch.no_grad():
            return evaluate(model)
    finally:
        model.train()
