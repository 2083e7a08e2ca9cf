"""Models for images: per-sample gradients of each against batches of one, and what they are made of."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.errors import ConfigurationError
from lsg.methods import DPSGD, LSG, Method
from lsg.models import scatter_cnn, scatter_linear, scatter_resnet, standardised_wrn
from lsg.models.standardised_conv import StandardisedConv2d
from tests.support.reference import assert_per_sample_gradients


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return {
        "wrn": lambda: standardised_wrn(10, 1, 5, 3, groups=4),
        "linear": lambda: scatter_linear(5, 3, 16, 12),
        "resnet": lambda: scatter_resnet(5, 3, 16, 16, channels=4, groups=2),
        "cnn": lambda: scatter_cnn(5, 3, 16, 16, channels=6),
    }[name]()


@pytest.mark.parametrize("method", [DPSGD(), LSG(rank=2, sparsity=0.3)], ids=str)
@pytest.mark.parametrize("name", ["wrn", "linear", "cnn", "resnet"])
def test_per_sample_gradients_equal_batches_of_one(name: str, method: Method) -> None:
    model = made(name).double()
    x = torch.rand(4, 3, 16, 12 if name == "linear" else 16, generator=torch.Generator().manual_seed(1))
    assert_per_sample_gradients(model, method, (x.double(), torch.arange(4)), 4, loss)


@pytest.mark.parametrize("method", [DPSGD(), LSG(rank=2, sparsity=0.3)], ids=str)
@pytest.mark.parametrize("name", ["wrn", "cnn", "resnet"])
def test_per_sample_gradients_under_autocast(name: str, method: Method) -> None:
    def lower(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    x = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    images = x.contiguous(memory_format=torch.channels_last)
    assert_per_sample_gradients(made(name), method, (images, torch.arange(4)), 4, lower, tolerance=0.03)


@pytest.mark.parametrize(("depth", "millions"), [(16, 2.75), (40, 8.95)])
def test_wide_resnets_have_the_published_size(depth: int, millions: float) -> None:
    model = standardised_wrn(depth, 4)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.03)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == depth and all(isinstance(conv, StandardisedConv2d) for conv in convs)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_wide_resnets_normalise_after_the_relu() -> None:
    model = made("wrn")
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    model(torch.randn(2, 3, 16, 16))
    assert len(seen) == 2 + 3 + 3 + 1 and all((x >= 0).all() and (x == 0).any() for x in seen)


def test_published_sizes_on_scattering_features() -> None:
    assert sum(p.numel() for p in scatter_cnn(10, 3, 32, 32).parameters()) == 187_210
    assert sum(p.numel() for p in scatter_linear(10, 1, 28, 28).parameters()) == 81 * 49 * 10 + 10


@pytest.mark.parametrize("name", ["wrn", "linear", "cnn", "resnet"])
def test_no_sample_sees_another(name: str) -> None:
    model = made(name)
    x = torch.rand(4, 3, 16, 12 if name == "linear" else 16)
    torch.testing.assert_close(model(x), torch.cat([model(x[i : i + 1]) for i in range(4)]), rtol=1e-4, atol=1e-4)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="depth=17"):
        standardised_wrn(17)
    with pytest.raises(ConfigurationError, match="channels=0"):
        scatter_cnn(10, 3, 32, 32, channels=0)
    with pytest.raises(ConfigurationError, match="channels=24: must be a multiple of groups=16"):
        scatter_resnet(10, 3, 32, 32, channels=24)
