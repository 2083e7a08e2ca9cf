"""What an attacker from outside found: state that leaves no trace, branches at random, what only large batches show."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.adversarial.cases.collection import Two, W, case, vectors


@case("refused", vectors(8, 6))
class StatisticsWrittenThroughData(Two):
    """A codebook's idiom: PyTorch counts no new version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(W))

    def between(self, h: Tensor) -> Tensor:
        self.mean.data.lerp_(h.detach().mean(0).to(self.mean.dtype), 0.1)
        return h


@case("refused", vectors(8, 6))
class StatisticsInAFrozenParameter(Two):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(W), requires_grad=False)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.copy_(h.mean(0))
        return h


@case("refused", vectors(8, 6))
class MixupNowAndThen(Two):
    def between(self, h: Tensor) -> Tensor:
        return 0.6 * h + 0.4 * h.flip(0) if self.training and float(torch.rand(())) < 0.4 else h


@case("refused", vectors(8, 9))
class CentredInLargeBatches(Two):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if len(h) >= 8 else h


@case("refused", vectors(8, 6))
class GradientClippedOverTheBatch(Two):
    """Only where it is long."""

    def between(self, h: Tensor) -> Tensor:
        if not h.requires_grad:
            return h
        h = h * 1.0
        h.register_hook(lambda g: g * torch.clamp(20 / (g.norm() + 1e-6), max=1.0))
        return h


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@case("refused", vectors(4, 3), call=lambda m, b: m(b.args[0], Holder(b.args[0])))
class RecordsInAnObject(Two):
    def forward(self, x: Tensor, held: Any) -> Tensor:  # type: ignore[override]
        return self.last(self.first(x) + held.x - held.x.mean(0))
