"""Branches that add nothing at first: what happens behind the gate counts from the first step on."""

import torch
from torch import Tensor, nn

from tests.adversarial.cases.collection import Two, W, case, vectors


class Gated(Two):
    """x + gate * branch, the gate a bare parameter of the model, zero at first."""

    shape: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(self.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.gate * self.branch(self.first(x)))

    def branch(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


@case("right or refused", vectors(4, 3, 2))
class CleanGate(Gated):
    def branch(self, h: Tensor) -> Tensor:
        return h.tanh()


@case("refused", vectors(4, 3))
class MixedBehindAGate(Gated):
    pass


@case("refused", vectors(4, 3))
class MixedBehindAVector(Gated):
    shape = (W,)


@case("refused", vectors(4, 3))
class MixedAndDetachedBehindAGate(Gated):
    def branch(self, h: Tensor) -> Tensor:
        return h - h.mean(0).detach()


class OwnGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.gate * branch


class GateModule(Two):
    def __init__(self) -> None:
        super().__init__()
        self.gate = OwnGate()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(x, self.branch(self.first(x))))

    def branch(self, h: Tensor) -> Tensor:
        return h.tanh()


@case("right", vectors(4, 3, 2))
class CleanGateModule(GateModule):
    pass


@case("refused", vectors(4, 3))
class MixedBehindAGateModule(GateModule):
    def branch(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


@case("refused", vectors(4, 3, 4))
class MixedBehindTwoGates(GateModule):
    """The gradient of each is zero while the other is: noise opens them."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = OwnGate()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.outer(x, self.gate(torch.zeros_like(h), h - h.mean(0))))


@case("refused", vectors(4, 3))
class MixedBehindAnAdapter(Two):
    """LoRA's second factor is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        down = self.first(x)
        return x + self.last(down - down.mean(0))


@case("refused", vectors(4, 3))
class MixedBehindADeadUnit(Two):
    """Behind a ReLU that is closed for all records at first, and opens when its bias has moved."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.first.weight.mul_(1e-3)
            self.first.bias.fill_(0.05)

    def between(self, h: Tensor) -> Tensor:
        closed = (h - h.mean(0) - 0.05).relu()
        return h + closed


@case("right or refused", vectors(4, 3))
class FrozenGate(Gated):
    """Never opens: no influence at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.requires_grad_(False)


@case("right", vectors(4, 3, 1))
class LayerScale(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scale = OwnScale()

    def between(self, h: Tensor) -> Tensor:
        return h + self.scale(h.tanh())


class OwnScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@case("right", vectors(4, 3, 1))
class CleanAdapter(Two):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(W, W).requires_grad_(False)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.last(self.first(x))
