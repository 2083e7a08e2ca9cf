"""Standardised convolutions: per-sample gradients of weight, gain and bias against batches of one, every method."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.explain import explain
from lsg.methods import DPSGD, LSG, RGP, Method, SparseDPSGD
from lsg.models.standardised_conv import StandardisedConv2d
from tests.support.reference import (
    assert_per_sample_gradients,
    attach,
    batch_of_one_gradients,
    project,
    relative_error,
)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(1), y)


def batch(channels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, channels, 9, 7, dtype=torch.double, generator=generator), torch.arange(5)


def network() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(
        StandardisedConv2d(3, 12, 3), nn.Tanh(), StandardisedConv2d(12, 10, 3, stride=2), StandardisedConv2d(10, 8, 1)
    ).double()
    for name, parameter in model.named_parameters():
        if not name.endswith("weight"):  # gains and biases as after some steps
            nn.init.normal_(parameter, mean=float(name.endswith("gain")), std=0.3)
    return model


@pytest.mark.parametrize(
    "method", [DPSGD(), SparseDPSGD(sparsity=0.4), RGP(rank=2), LSG(rank=2, sparsity=0.5)], ids=str
)
def test_per_sample_gradients_equal_batches_of_one(method: Method) -> None:
    assert_per_sample_gradients(network(), method, batch(3), 5, loss)


def test_low_rank_methods_project_its_weights() -> None:
    kinds = {row.name: row.kind for row in explain(network(), RGP(rank=2)).rows}
    assert kinds["2.weight"] == "projected" and kinds["2.gain"] == kinds["2.bias"] == "dense"


@pytest.mark.parametrize("frozen", [("gain", "bias"), ("weight",), ("weight", "bias")])
@pytest.mark.parametrize("method", [DPSGD(), RGP(rank=2)], ids=str)
def test_what_is_frozen_may_be(frozen: tuple[str, ...], method: Method) -> None:
    model = network()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.rsplit(".", 1)[-1] not in frozen
    plain = network()
    engine, optimizer, _ = attach(model, method)
    loss(model, batch(3)).backward()
    got, spaces = engine.per_sample_gradients(), engine.subspaces
    wanted = batch_of_one_gradients(plain, batch(3), 5, loss)
    assert set(got) == {name for name in wanted if name.rsplit(".", 1)[-1] not in frozen}
    for name, gradient in got.items():
        found, expected = (gradient,), (wanted[name],)
        if name in spaces:
            found, expected = gradient, project(wanted[name], spaces[name])
        for one, other in zip(found, expected, strict=True):
            assert relative_error(one, other) < 1e-9, name
    optimizer.zero_grad()
    engine.detach()


def test_kernels_have_no_mean_and_the_length_of_their_gain() -> None:
    conv = StandardisedConv2d(4, 6, 3).double()
    nn.init.uniform_(conv.gain, 0.5, 2.0)
    direction, length, inside = conv.directions()
    torch.testing.assert_close(direction.mean(1), torch.zeros(6, dtype=torch.double))
    torch.testing.assert_close(direction.norm(dim=1), torch.ones(6, dtype=torch.double))
    assert inside.all() and (length > 0).all()


def test_a_kernel_without_variance_is_not_divided_by_zero() -> None:
    model = nn.Sequential(StandardisedConv2d(3, 2, 3), StandardisedConv2d(2, 2, 3)).double()
    model[0].weight.data.fill_(0.25)
    model[0].weight.data[0, 0, 0, 0] += 1e-3
    assert_per_sample_gradients(model, DPSGD(), batch(3), 5, loss)
