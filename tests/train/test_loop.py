"""The training loop: what it records, what it calls, and that it leaves the accounting to the engine."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, ConfigurationError, NonPrivate, PrivacyEngine
from lsg.checkpoint import load_checkpoint, save_checkpoint
from lsg.train.loop import Epoch, LoopState, accuracy, train

DELTA = 1e-3
RECORDS, BATCH = 60, 20


def parts(noise: float = 2.0, micro: int | None = None, private: bool = True, **sampling: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x = torch.randn(RECORDS, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    engine = PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=sampling.get("batch_size", BATCH)),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        method=DPSGD() if private else NonPrivate(),
        max_physical_batch_size=micro,
        noise_generator=torch.Generator().manual_seed(0),
    )
    return *made, engine


def test_every_epoch_is_recorded_with_the_epsilon_spent_so_far() -> None:
    *made, engine = parts()
    history = train(*made, engine, epochs=3, delta=DELTA)
    assert [epoch.number for epoch in history] == [1, 2, 3]
    epsilons = [epoch.epsilon for epoch in history]
    assert 0 < epsilons[0] < epsilons[1] < epsilons[2] == engine.get_epsilon(DELTA)
    assert all(epoch.seconds > 0 and epoch.loss > 0 and epoch.score is None for epoch in history)
    assert len(engine.accountant) == 3 * RECORDS // BATCH == history[-1].steps


def test_micro_batches_are_one_step_and_one_call() -> None:
    *made, engine = parts(micro=3)
    seen: list[int] = []
    train(*made, engine, epochs=2, delta=DELTA, on_step=seen.append)
    assert seen == list(range(1, len(engine.accountant) + 1))


def test_the_loss_is_the_mean_over_samples_not_over_micro_batches() -> None:
    # Each sample's loss is its own index: the mean over samples does not depend on how they were split.
    def index_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (0 * model(batch[0]).sum(dim=1) + batch[0][:, 0]).mean()

    losses = []
    for micro in (None, 7):
        *made, engine = parts(micro=micro)
        losses.append([epoch.loss for epoch in train(*made, engine, epochs=2, delta=DELTA, loss=index_loss)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_evaluation_sees_eval_mode_without_gradients_and_training_goes_on_in_train_mode() -> None:
    model, *rest = parts()
    modes: list[tuple[bool, bool]] = []

    def evaluate(evaluated: nn.Module) -> float:
        modes.append((evaluated.training, torch.is_grad_enabled()))
        return 0.25

    heard: list[Epoch] = []
    history = train(model, *rest, epochs=2, delta=DELTA, evaluate=evaluate, on_epoch=heard.append)
    assert modes == [(False, False)] * 2
    assert model.training
    assert heard == history and [epoch.score for epoch in history] == [0.25, 0.25]


def test_without_noise_epsilon_is_infinite() -> None:
    history = train(*parts(noise=0.0, private=False), epochs=1, delta=DELTA)
    assert history[0].epsilon == math.inf


def test_an_epoch_that_drew_no_sample_has_no_loss_but_is_accounted() -> None:
    *made, engine = parts()
    loader = made[-1]
    loader.logical._draw = lambda count: [torch.empty(0, dtype=torch.long)] * count
    history = train(*made, engine, epochs=1, delta=DELTA)
    assert math.isnan(history[0].loss) and history[0].epsilon > 0
    assert len(engine.accountant) == RECORDS // BATCH


def test_samples_and_the_learning_rate_of_the_last_step_are_recorded() -> None:
    model, optimizer, loader, engine = parts()
    drawn: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        drawn.append(len(batch[0]))
        optimizer.param_groups[0]["lr"] = 0.1 * len(drawn)
        return model(batch[0]).sum() / len(batch[0])

    (epoch,) = train(model, optimizer, loader, engine, epochs=1, delta=DELTA, loss=loss)
    assert epoch.samples == sum(drawn) and epoch.lr == pytest.approx(0.1 * len(drawn))


def test_it_saves_after_epochs_and_every_so_many_steps_and_goes_on_from_there(tmp_path: Path) -> None:
    *made, engine = parts()
    saved: list[LoopState] = []

    def save(point: LoopState) -> None:
        saved.append(point)
        if point.steps == 4:  # in the middle of the second epoch
            save_checkpoint(tmp_path / "state", engine=engine, extra=asdict(point))

    whole = train(*made, engine, epochs=2, delta=DELTA, save=save, save_every=2)
    assert [(point.epochs, point.steps) for point in saved] == [(0, 2), (1, 3), (1, 4), (1, 6), (2, 6)]
    assert saved[0].samples > 0 and saved[0].loss > 0 and saved[0].seconds > 0
    assert saved[1] == LoopState(epochs=1, steps=3, lr=0.5)

    *made, engine = parts()
    start = LoopState(**load_checkpoint(tmp_path / "state", engine=engine))
    assert start == saved[2]
    (rest,) = train(*made, engine, epochs=2, delta=DELTA, start=start)
    assert rest.seconds > start.seconds
    assert replace(rest, seconds=0) == replace(whole[1], seconds=0)


def test_zero_epochs_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="epochs=0"):
        train(*parts(), epochs=0, delta=DELTA)


def test_accuracy_counts_the_largest_logits() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [1.0, 0.0]])
    assert accuracy(nn.Identity(), logits, torch.tensor([0, 1, 1, 0])) == 0.75
