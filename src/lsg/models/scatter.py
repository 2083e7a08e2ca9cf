"""Classifiers on scattering features: images (batch, channels, height, width) in, logits (batch, classes) out.

Fixed features need no noise, and what is trained on them is small: for small budgets this beats networks that learn
everything (Tramèr and Boneh, 2021, "Differentially Private Learning Needs Better Features").
"""

from torch import Tensor, nn

from lsg.errors import ConfigurationError
from lsg.models.scattering import FEATURES, STRIDE, Scattering
from lsg.models.standardised_conv import StandardisedConv2d
from lsg.models.standardised_wrn import Block

GROUPS = 27  # of three features of a grey image, or of nine of one in colour


class ScatterClassifier(nn.Module):
    """front: fixed and untrained. It may be taken off, and the model be given its features, computed once.

    Then `layers`, which are trained and keep or halve the map, and a linear `head`.
    """

    def __init__(self, front: nn.Module, layers: nn.Module, features: int, classes: int) -> None:
        super().__init__()
        self.front, self.layers = front, layers
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.front(x)).flatten(1))


def scatter_linear(classes: int, in_channels: int, height: int, width: int) -> ScatterClassifier:
    """One linear layer on normalised scattering features. Images of 8 x 8 pixels or more."""
    features = in_channels * FEATURES * (height // STRIDE) * (width // STRIDE)
    return ScatterClassifier(_front(in_channels, height, width), nn.Identity(), features, classes)


def scatter_cnn(classes: int, in_channels: int, height: int, width: int, *, channels: int = 64) -> ScatterClassifier:
    """Two convolutions of so many channels with tanh, with a pooling in between, then one linear layer."""
    if channels < 1:
        raise ConfigurationError(f"channels={channels}: must be at least 1")
    layers = nn.Sequential(
        nn.Conv2d(in_channels * FEATURES, channels, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.Tanh(),
    )
    features = channels * (height // STRIDE // 2) * (width // STRIDE // 2)
    return ScatterClassifier(_front(in_channels, height, width), layers, features, classes)


def scatter_resnet(
    classes: int, in_channels: int, height: int, width: int, *, channels: int = 64, groups: int = 16
) -> ScatterClassifier:
    """Four blocks of a wide ResNet, as in De et al. (2022), on normalised scattering features: for a large budget.

    channels: of the first two blocks, a multiple of `groups`; the others have twice as many, on half the map."""
    if channels < 1 or channels % groups:
        raise ConfigurationError(f"channels={channels}: must be a multiple of groups={groups}")
    layers = nn.Sequential(
        StandardisedConv2d(in_channels * FEATURES, channels, 3),
        Block(channels, channels, 1, groups),
        Block(channels, channels, 1, groups),
        Block(channels, 2 * channels, 2, groups),
        Block(2 * channels, 2 * channels, 1, groups),
        nn.ReLU(),
        nn.GroupNorm(groups, 2 * channels),
        nn.AdaptiveAvgPool2d(1),
    )
    return ScatterClassifier(_front(in_channels, height, width), layers, 2 * channels, classes)


def _front(in_channels: int, height: int, width: int) -> nn.Sequential:
    """Each image normalised by itself: statistics of the data would cost privacy."""
    return nn.Sequential(Scattering(height, width), nn.GroupNorm(GROUPS, in_channels * FEATURES, affine=False))
