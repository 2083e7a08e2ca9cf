"""What the hand-written loops share: attach lsg, read what a step does to the weights, compare with the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lsg import DPSGD
from tests.adversarial.oracle import WrongError
from tests.support.reference import attach

C = 0.5  # max_grad_norm of all loops


def private(model: nn.Module, **options: Any) -> Any:
    """Engine, optimizer and loader, without noise; the loss is a sum and a step is the negative clipped sum."""
    return attach(model, DPSGD(), max_grad_norm=C, loss_reduction="sum", **options)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def clipped_sum(gradients: list[Tensor]) -> Tensor:
    """Of each record's own gradient."""
    return sum((g * min(1.0, C / float(g.norm())) for g in gradients), torch.zeros_like(gradients[0]))


def own_gradient(model: nn.Module, loss: Tensor) -> Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    parts = zip(grads, model.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in parts])


def expect_update(
    plain: nn.Module, model: nn.Module, before: Tensor, loss_of: Callable[[nn.Module, Tensor], Tensor], x: Tensor
) -> None:
    """The weights must have moved by the sum of each record's own clipped gradient, on the plain model."""
    wanted = clipped_sum([own_gradient(plain, loss_of(plain, x[i : i + 1])) for i in range(len(x))])
    expect(before - weights(model), wanted, "update")


def expect(found: Tensor, wanted: Tensor, what: str) -> None:
    error = float((found - wanted).norm() / wanted.norm().clamp_min(1e-9))
    if not error < 1e-6:
        raise WrongError(f"{what}: relative error {error:.1e}")


def expect_influence(sums: list[Tensor], most: float = 1.0) -> None:
    """Two updates, with and without a record, differ by at most `most` times the bound."""
    influence = float((sums[0] - sums[1]).norm()) / C
    if not influence <= most * 1.001:
        raise WrongError(f"influence: {influence:.3f} C")
