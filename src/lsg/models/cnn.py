"""Small convolutional network: square images (batch, channels, size, size) in, logits (batch, classes) out.

Tanh bounds the activations and with them the gradients, so that clipping removes less of them than with ReLU
(Papernot et al., 2021, "Tempered Sigmoid Activations"); GroupNorm keeps samples apart.
"""

import torch
from torch import Tensor, nn

from lsg.errors import ConfigurationError

GROUPS = 8
# Pooling stops here: a smaller map would leave the head too few features.
SMALLEST_MAP = 4


class SmallCNN(nn.Module):
    """Blocks of conv3x3-norm-tanh-pool, then one linear layer. Built by `small_cnn`."""

    def __init__(self, widths: list[int], classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        inputs = [in_channels, *widths[:-1]]
        # Neither bias nor affine norm: GroupNorm undoes a bias, and every parameter trained costs noise.
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, 3, padding=1, bias=False) for i, o in zip(inputs, widths, strict=True)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, width, affine=False) for width in widths)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(widths[-1] * (image_size >> len(widths)) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.pool(torch.tanh(norm(conv(x))))
        return self.head(x.flatten(1))


def small_cnn(classes: int = 10, in_channels: int = 1, image_size: int = 28, *, width: int = 32) -> SmallCNN:
    """A small CNN for digits (8), MNIST (28) or CIFAR (32).

    In: the number of classes and channels, and the side of the square images, at least 4. width: channels of the first
    block, a multiple of 8.
    Out: an untrained model: two or more blocks of width, 2 width, 2 width, ... channels, each halving the image.
    """
    for name, value, least in (("classes", classes, 1), ("in_channels", in_channels, 1), ("image_size", image_size, 4)):
        if value < least:
            raise ConfigurationError(f"{name}={value}: must be at least {least}")
    if width < 1 or width % GROUPS:
        raise ConfigurationError(f"width={width}: must be a multiple of {GROUPS}, the groups of its GroupNorm")
    widths = [width, 2 * width]
    while image_size >> len(widths) > SMALLEST_MAP:
        widths.append(2 * width)
    return SmallCNN(widths, classes, in_channels, image_size)
