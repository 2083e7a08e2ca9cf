"""|W| and |∂W| of one layer: the right layer, the right gradient, nothing left behind."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.errors import ConfigurationError
from lsg.models import small_cnn
from lsg.reproduce.intensity import Intensity, measure_intensity


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 6), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 12), nn.Linear(12, 3)
    )


def loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.tensor([[1, 2], [3, 4]])), torch.tensor([0, 2]))


def test_the_gradient_is_autograds(model: nn.Module) -> None:
    model.requires_grad_(False)  # a frozen layer has a gradient to look at too
    found = measure_intensity(model, loss)
    assert found.layer == "2.weight"  # the first of the largest; the embedding is larger and does not count
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    model.requires_grad_(True)
    loss(model).backward()
    np.testing.assert_allclose(found.gradient, model[2].weight.grad.abs(), rtol=1e-6)
    np.testing.assert_allclose(found.weight, model[2].weight.detach().abs())


def test_a_layer_can_be_chosen_by_name(model: nn.Module) -> None:
    assert measure_intensity(model, loss, "4").layer == measure_intensity(model, loss, "4.weight").layer == "4.weight"
    with pytest.raises(ConfigurationError, match=r"--layer 'x' is none of the model's weights: 2\.weight, 4\.weight"):
        measure_intensity(model, loss, "x")


def test_a_convolution_is_outputs_by_inputs_with_their_taps() -> None:
    cnn = small_cnn(classes=10, in_channels=1, image_size=8)
    found = measure_intensity(cnn, lambda model: model(torch.rand(4, 1, 8, 8)).square().mean())
    assert found.layer == "convs.1.weight" and found.weight.shape == found.gradient.shape == (64, 32 * 9)


def test_the_observation_counts_what_the_paper_sees() -> None:
    rows = np.arange(1.0, 11.0)[:, None] * np.ones((10, 20))
    gradient = np.zeros((10, 20))
    gradient[-1] = 1.0  # one output unit, a tenth of all entries, holds everything
    gradient += np.arange(10)[:, None] * 1e-9 + np.arange(20)[::-1] * 1e-9
    text = Intensity("fc1", rows + np.arange(20) * 1e-3, gradient).observation
    assert "largest 10% of the entries hold 100 %" in text
    assert "input units -1.00" in text and "output units +1.00" in text
