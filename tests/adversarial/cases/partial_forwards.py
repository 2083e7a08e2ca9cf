"""Parts of a model called by themselves, several forwards of one step, and `forward` called by hand."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.adversarial.cases.collection import Two, W, case, loop, vectors
from tests.adversarial.cases.training import expect_update, private, weights
from tests.adversarial.records import Batch


def _train(make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, Tensor], Tensor], *sizes: int) -> None:
    """Some steps with a loop that runs the model by `loss_of`; each must be the plain model's."""
    torch.manual_seed(0)
    model = make().double()
    plain = copy.deepcopy(model)
    _, optimizer, _ = private(model)
    for records in vectors(*sizes):
        (x,) = records.args
        plain.load_state_dict(model.state_dict())
        before = weights(model)
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        expect_update(plain, model, before, loss_of, x)


def parts() -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(W, W), "head": nn.Linear(W, W)})


@loop("right or refused")
def parts_of_a_dictionary() -> None:
    _train(parts, lambda m, x: m["head"](m["body"](x).tanh()).square().sum(), 4, 3)


@loop("refused")
def parts_of_a_dictionary_that_mix() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model["body"](x)
        return model["head"](h - h.mean(0)).square().sum()

    _train(parts, loss_of, 4, 3)


@loop("refused")
def parts_of_a_dictionary_that_mix_detached() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model["body"](x)
        return model["head"](h - h.mean(0).detach()).square().sum()

    _train(parts, loss_of, 4, 3)


@loop("right or refused")
def parts_called_time_first() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        pair = torch.stack([x, x + 1])  # (2, B, F)
        return model["head"](model["body"](pair).tanh()).square().sum()

    _train(parts, loss_of, 4, 2)


@loop("right or refused")
def parts_called_with_a_leading_one() -> None:
    _train(parts, lambda m, x: m["head"](m["body"](x[None])[0].tanh()).square().sum(), 4, 3)


@loop("right or refused")
def parts_before_the_whole() -> None:
    """The whole model is known before a part of it is called alone."""
    _train(Two, lambda m, x: (m(x) + m.first(x)).square().sum(), 4, 3)


@loop("right or refused")
def a_part_alone() -> None:
    _train(Two, lambda m, x: m.first(x).square().sum(), 4, 3)


@loop("refused")
def a_part_alone_that_mixes() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model.first(x)
        return (h - h.mean(0)).square().sum() + model(x).square().sum()

    _train(Two, loss_of, 4, 3)


def by_forward(model: nn.Module, batch: Batch) -> Tensor:
    """Without the hooks that `model(x)` runs."""
    return model.forward(*batch.args)


@case("right or refused", vectors(4, 3, 1), call=by_forward)
class ForwardByHand(Two):
    pass


@case("refused", vectors(4, 3), call=by_forward)
class ForwardByHandThatMixes(Two):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


@case("right or refused", vectors(4, 3))
class LayersCalledByForward(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last.forward(self.first.forward(x).tanh())


@case("refused", vectors(4, 3))
class LayersCalledByForwardThatMix(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first.forward(x)
        return self.last.forward(h - h.mean(0))


@case("right or refused", vectors(4, 3), call=lambda m, b: (m(*b.args), m(b.args[0] * 2)))
class TwoForwardsOfOneBatch(Two):
    """Siamese: both sides of a record go through one model, and one loss."""


@loop("right or refused")
def body_without_gradients() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = model["body"](x)
        return model["head"](h).square().sum()

    _train(parts, loss_of, 4, 3)


@loop("refused")
def mixed_between_two_forwards() -> None:
    """The first forward's mean goes into the second as an input of its own."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        mean = model(x).mean(0)
        return model(x + mean).square().sum()

    _train(Two, loss_of, 4, 3)
