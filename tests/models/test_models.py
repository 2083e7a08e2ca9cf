"""The model zoo: shapes, sizes, what is trained, and that no sample sees another."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lsg.errors import ConfigurationError
from lsg.models import small_cnn, wide_resnet, wrn28


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("width", "millions"), [(2, 1.46), (4, 5.84)])
def test_wrn28_has_the_published_number_of_parameters(width: int, millions: float) -> None:
    assert count(wrn28(width)) / 1e6 == pytest.approx(millions, abs=0.01)


def test_wrn28_has_28_convolutions_a_head_and_no_other_parameters() -> None:
    model = wrn28(2)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert all(conv.bias is None for conv in convs)
    # "28" counts the stem, 3 stages x 4 blocks x 2, and the three shortcuts.
    assert len(convs) == 28
    assert sum(conv.kernel_size == (1, 1) for conv in convs) == 3
    assert count(model) == sum(count(conv) for conv in convs) + count(model.head)


def test_wide_resnet_halves_the_resolution_twice() -> None:
    model = wide_resnet(10, 2, classes=5, in_channels=1)
    shapes = []
    for stage in (model.stem, model.stage1, model.stage2, model.stage3):
        stage.register_forward_hook(lambda _module, _inputs, output: shapes.append(tuple(output.shape[1:])))
    logits = model(torch.randn(3, 1, 32, 32))
    assert logits.shape == (3, 5)
    assert shapes == [(16, 32, 32), (32, 32, 32), (64, 16, 16), (128, 8, 8)]


def test_groups_are_lowered_to_divide_the_channels() -> None:
    norms = [m for m in wide_resnet(10, 3, groups=32).modules() if isinstance(m, nn.GroupNorm)]
    assert {norm.num_channels: norm.num_groups for norm in norms} == {16: 16, 48: 16, 96: 32, 192: 32}


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [({"depth": 27}, "depth=27"), ({"depth": 4}, "depth=4"), ({"width": 0}, "width=0"), ({"classes": 0}, "classes=0")],
)
def test_wide_resnet_refuses_impossible_sizes(arguments: dict[str, int], culprit: str) -> None:
    with pytest.raises(ConfigurationError, match=culprit):
        wide_resnet(**arguments)


@pytest.mark.parametrize("image_size", [4, 8, 28, 32, 33, 64])
def test_small_cnn_fits_any_image(image_size: int) -> None:
    model = small_cnn(7, 3, image_size)
    assert model(torch.randn(2, 3, image_size, image_size)).shape == (2, 7)
    assert count(model) < 130_000


@pytest.mark.parametrize(("arguments", "culprit"), [((10, 1, 3), "image_size=3"), ((0, 1, 8), "classes=0")])
def test_small_cnn_refuses_impossible_sizes(arguments: tuple[int, int, int], culprit: str) -> None:
    with pytest.raises(ConfigurationError, match=culprit):
        small_cnn(*arguments)


def test_small_cnn_has_the_width_asked_for() -> None:
    assert [conv.out_channels for conv in small_cnn(10, 1, 32, width=48).convs] == [48, 96, 96]
    with pytest.raises(ConfigurationError, match="width=12: must be a multiple of 8"):
        small_cnn(width=12)


@pytest.mark.parametrize("model", [wide_resnet(10, 1), small_cnn(10, 3, 16)], ids=["wrn", "cnn"])
def test_no_sample_sees_another(model: nn.Module) -> None:
    model = model.double().train()
    x = torch.randn(4, 3, 16, 16, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([model(x[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(model(x), alone)


@pytest.mark.parametrize("model", [wide_resnet(10, 1), small_cnn(10, 3, 16)], ids=["wrn", "cnn"])
def test_every_parameter_gets_a_gradient(model: nn.Module) -> None:
    F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
