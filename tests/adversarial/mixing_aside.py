"""Mixing that is not in the forward's plain sight: hooks, backwards, checkpoints, what is kept from batch to batch."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.adversarial.mixing import mixing_op
from tests.adversarial.modules import Gate
from tests.adversarial.ops import Op, mixing


class Centring(torch.autograd.Function):
    """Nothing forward; backward, the batch's mean is taken off."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g - g.mean(0)


@mixing_op
def gradient_centred(h: Tensor) -> Tensor:
    return Centring.apply(h)


@mixing
class BackwardHooked(Op):
    """A module's backward hook rescales over the batch."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)
        self.layer.register_full_backward_hook(lambda m, d_in, d_out: tuple(map(_unit, d_in)))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


def _unit(g: Tensor | None) -> Tensor | None:
    return None if g is None else g / (g.norm() + 1e-6)


@mixing
class ForwardHooked(Op):
    """A hook centres what a layer gives."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)
        self.layer.register_forward_hook(lambda m, args, out: out - out.mean(0))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


class MixedNest(nn.Module):
    def __init__(self, F: int) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(F)), nn.Linear(F, F)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h - h.mean(0)) * self.scale


@mixing
class MixedInsideOwnModule(Op):
    """In front of a layer inside a module with a bare parameter."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = MixedNest(F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


@mixing
class MixedInsideACheckpoint(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.first, self.second = nn.Linear(F, F), nn.Linear(F, F)

    def run(self, h: Tensor) -> Tensor:
        h = self.first(h)
        return self.second(h - h.mean(0))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return checkpoint(self.run, h, use_reentrant=False)


@mixing
class PublishedMean(Op):
    """Keeps a mean of its inputs and does not use it: it is saved with the weights all the same."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.register_buffer("mean", torch.zeros(F))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * h.detach().reshape(-1, h.shape[-1]).mean(0))
        return h * 1.0


@mixing
class Remembers(Op):
    """Adds what the batch before left in an attribute."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.last: Any = 0.0

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        out = h + self.last
        self.last = h.detach().reshape(-1, h.shape[-1]).mean(0)
        return out


@mixing
class DoublyGated(Op):
    """Behind two gates in a row: neither has a gradient while the other is shut."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.inner, self.outer = Gate(F, vector=False), Gate(F, vector=True)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.outer(h, self.inner(torch.zeros_like(h), h - h.mean(0).detach()))
