"""What stays from batch to batch, and hooks on tensors and modules."""

from typing import Any

import torch
from torch import Tensor

from tests.adversarial.cases.collection import Two, W, case, vectors


class RunningMean(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(W))

    def between(self, h: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(0.5 * h.detach().mean(0))
        return h


@case("refused", vectors(4, 4, 3))
class RunningMeanUsed(RunningMean):
    """What the records of one step leave there reaches the next step past the noise."""

    def between(self, h: Tensor) -> Tensor:
        out = h - self.mean
        super().between(h)
        return out


@case("refused", vectors(4, 4, 3))
class RunningMeanPublished(RunningMean):
    """Not used, but saved with the weights."""


@case("right or refused", vectors(4, 4, 3))
class Counter(Two):
    """A buffer that no record has a say in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1.0)
        return h.tanh()


@case("refused", vectors(4, 4, 3), stateful=True)
class LastBatchRemembered(Two):
    """An attribute, in no state_dict."""

    last_mean: Any = 0.0

    def between(self, h: Tensor) -> Tensor:
        out = h - self.last_mean
        self.last_mean = h.detach().mean(0)
        return out


@case("refused", vectors(4, 4, 3), stateful=True)
class Queue(Two):
    """Keys of earlier batches, as MoCo keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Tensor] = []

    def between(self, h: Tensor) -> Tensor:
        keys = torch.cat([torch.ones(1, W, dtype=h.dtype), *self.queue])
        self.queue = [*self.queue, h.detach()]
        return h + (h @ keys.T).softmax(1) @ keys


@case("refused", vectors(4, 3))
class HookOnATensor(Two):
    """The forward is clean; the hook divides gradients by their norm over the batch."""

    def between(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda g: g / g.norm())
        return h.tanh()


@case("refused", vectors(4, 3))
class BackwardHookOnALayer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.last.register_full_backward_hook(lambda m, d_in, d_out: tuple(g / g.norm() for g in d_in))


class Centring(torch.autograd.Function):
    """An autograd function whose backward mixes."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g - g.mean(0)


@case("refused", vectors(4, 3))
class BackwardThatCentres(Two):
    def between(self, h: Tensor) -> Tensor:
        return Centring.apply(h)


@case("right or refused", vectors(4, 3))
class HookThatOnlyLooks(Two):
    def between(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda g: None)
        return h.tanh()


@case("refused", vectors(4, 3))
class ForwardHookThatCentres(Two):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda m, args, out: out - out.mean(0))


@case("refused", vectors(4, 3))
class InputHookThatCentres(Two):
    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_pre_hook(lambda m, args: (args[0] - args[0].mean(0),))
