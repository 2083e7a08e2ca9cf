"""The study of what helps: its tools do what they are said to do, and its rows say where they come from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lsg import DPSGD, LSG, RGP, PrivacyEngine
from lsg.methods import Method
from lsg.step.optimizer import PrivateOptimizer
from tests.test_docs import module_at

ROOT = Path(__file__).parents[1]
METHODS = (DPSGD(), RGP(rank=4), LSG(rank=4, sparsity=0.5))
tools = module_at(ROOT / "benchmarks" / "what_helps_tools.py")


def private(method: Method, noise_multiplier: float = 1.0) -> tuple[nn.Linear, PrivateOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(40, 30, bias=False)
    data = torch.utils.data.TensorDataset(torch.randn(50, 40))
    _, optimizer, _ = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(data, batch_size=10),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        method=method,
        loss_reduction="sum",
    )
    return model, optimizer


def lifted(optimizer: PrivateOptimizer, draws: int) -> tuple[Any, torch.Tensor]:
    """The slot, and so many gradients that are noise of deviation 1 before the lift."""
    recorder: Any = optimizer.gradients.recorder  # type: ignore[attr-defined]
    recorder.ready()
    (slot,) = recorder.slots.values()
    noise = [next(iter(recorder.lift(torch.randn(slot.dimensions))))[1] for _ in range(draws)]
    return slot, torch.stack(noise)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_noise_of_a_lifted_gradient_has_the_variance_that_is_subtracted(method: Method) -> None:
    """2,000 draws: a variance is off by about 3 %, and the 1,200 of them together by 0.1 %."""
    _, optimizer = private(method)
    slot, gradients = lifted(optimizer, 2000)
    expected = tools.noise_variance(slot) * torch.ones(30, 40)
    assert torch.allclose(gradients.square().mean(0), expected, rtol=0.25, atol=1e-3)
    assert gradients.square().mean() == pytest.approx(expected.mean().item(), rel=0.01)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_without_noise_singular_values_do_not_shrink(method: Method) -> None:
    model, optimizer = private(method, noise_multiplier=1e-4)
    tools.Shrink(optimizer)
    _, (gradient,) = lifted(optimizer, 1)
    model.weight.grad = gradient.clone()
    optimizer.original_optimizer.step()
    assert torch.allclose(model.weight.grad, gradient, atol=1e-3)


def test_of_noise_alone_nothing_is_left_and_a_strong_signal_stays() -> None:
    torch.manual_seed(0)
    noise, signal = torch.randn(40, 200), 5 * torch.outer(torch.randn(40), torch.randn(200))
    assert tools.shrunk(noise, 1.1).norm() == 0
    assert (tools.shrunk(signal + noise, 1.0) - signal).norm() < 0.3 * noise.norm()


def test_the_low_pass_filter_keeps_what_is_constant_and_loses_what_alternates() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    tools.LowPass(optimizer, 0.9)
    for step in range(200):
        weight.grad = torch.tensor([1.0, (-1.0) ** step])
        optimizer.step()
        assert weight.grad[0] == pytest.approx(1.0, abs=1e-5)
    assert abs(weight.grad[1]) < 1e-2


def test_adaptive_clipping_spends_on_count_and_gradients_what_the_step_has() -> None:
    """Scaled to deviation 1 of noise, a record moves the gradients by 1 / sigma_g and the centred count by half."""
    clip = tools.AdaptiveClip(sigma=2.0, batch=500)
    moved = (1 / clip.sigma_gradients) ** 2 + (0.5 / clip.sigma_count) ** 2
    assert moved == pytest.approx(1 / 2.0**2)


def test_every_row_says_where_it_comes_from() -> None:
    for line in (ROOT / "results" / "what-helps" / "cells.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert len(row["seeds"]) == len(row["scores"]) >= 3 and row["lr"] > 0, row["tool"]
        origin = row["provenance"]
        assert origin["command"] and origin["commit"] and origin["modified"] is False, row["tool"]
        assert origin["versions"]["torch"] and origin["hardware"]["cpu"], row["tool"]
