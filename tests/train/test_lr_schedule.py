"""The learning rate over a run, empty steps included."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, PrivacyEngine
from lsg.train.lr_schedule import attach_lr_schedule, share


def test_linear_goes_from_one_to_almost_zero() -> None:
    assert [share("linear", step, 4) for step in range(5)] == [1, 0.75, 0.5, 0.25, 0]


def test_steps_divide_by_five_at_30_60_and_80_percent() -> None:
    shares = [share("steps", step, 10) for step in range(10)]
    assert shares == pytest.approx([1, 1, 1, 1 / 5, 1 / 5, 1 / 5, 1 / 25, 1 / 25, 1 / 125, 1 / 125])
    assert 0.5 * shares[-1] == pytest.approx(4e-3)  # the paper's last learning rate


def test_constant_stays() -> None:
    assert share("constant", 9, 10) == 1


def test_warm_up_rises_above_zero_and_the_schedule_has_the_rest() -> None:
    assert [share("linear", step, 8, 0.5) for step in range(9)] == [0.2, 0.4, 0.6, 0.8, 1, 0.75, 0.5, 0.25, 0]
    assert [share("constant", step, 4, 0.25) for step in range(4)] == [0.5, 1, 1, 1]


@pytest.mark.parametrize("schedule", ["constant", "linear", "steps"])
def test_without_warm_up_a_schedule_is_as_it_was(schedule: str) -> None:
    assert [share(schedule, step, 7, 0.01) for step in range(8)] == [share(schedule, step, 7) for step in range(8)]


def test_a_step_without_samples_moves_the_schedule_too() -> None:
    model = nn.Linear(2, 2)
    _, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=DPSGD(),
    )
    attach_lr_schedule(optimizer, "linear", 4)
    loader.logical._draw = lambda count: [torch.empty(0, dtype=torch.long)] * count
    assert list(loader) == []
    assert optimizer.param_groups[0]["lr"] == 0.0
