"""WideResNet with GroupNorm: images (batch, channels, height, width) in, logits (batch, classes) out.

Pre-activation wide residual networks (Zagoruyko and Komodakis, 2016), normalised by GroupNorm without affine
parameters as in RGP's CIFAR-10 experiments: convolutions and the final linear layer are all that is trained.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from lsg.errors import ConfigurationError


def _norm(channels: int, groups: int) -> nn.GroupNorm:
    """GroupNorm without affine parameters; the gcd is the most groups that divide both numbers evenly."""
    return nn.GroupNorm(math.gcd(groups, channels), channels, affine=False)


class BasicBlock(nn.Module):
    """norm-relu-conv3x3 twice, plus the input: (batch, inputs, h, w) to (batch, outputs, h/stride, w/stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = _norm(inputs, groups)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm2 = _norm(outputs, groups)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = None if same_shape else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        # A projecting shortcut starts after the first activation, as in the WideResNet authors' code.
        identity = x if self.shortcut is None else self.shortcut(h)
        h = F.relu(self.norm2(self.conv1(h)))
        return identity + self.conv2(h)


class WideResNet(nn.Module):
    """Stem, three stages of basic blocks, norm-relu, global average pool, linear head. Built by `wide_resnet`."""

    def __init__(self, blocks: int, width: int, classes: int, in_channels: int, groups: int) -> None:
        super().__init__()
        widths = (16, 16 * width, 32 * width, 64 * width)
        self.stem = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        self.stage1 = _stage(blocks, widths[0], widths[1], 1, groups)
        self.stage2 = _stage(blocks, widths[1], widths[2], 2, groups)
        self.stage3 = _stage(blocks, widths[2], widths[3], 2, groups)
        self.norm = _norm(widths[3], groups)
        self.head = nn.Linear(widths[3], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.stem(x))))
        x = F.relu(self.norm(x)).mean(dim=(2, 3))
        return self.head(x)


def _stage(blocks: int, inputs: int, outputs: int, stride: int, groups: int) -> nn.Sequential:
    """`blocks` basic blocks; only the first one changes the number of channels and the resolution."""
    first = BasicBlock(inputs, outputs, stride, groups)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1, groups) for _ in range(blocks - 1)))


def wide_resnet(
    depth: int = 28, width: int = 4, classes: int = 10, in_channels: int = 3, *, groups: int = 16
) -> WideResNet:
    """A WideResNet of `depth` layers (6n + 4) with n blocks a stage, `width` times as wide as a plain ResNet.

    In: the sizes; `groups` is the number of GroupNorm groups, lowered where it does not divide a layer's channels.
    Out: an untrained model. Width 4 at depth 28 has 5.8 million parameters, width 2 has 1.5 million.
    """
    check_sizes(depth=depth, width=width, classes=classes, in_channels=in_channels, groups=groups)
    return WideResNet((depth - 4) // 6, width, classes, in_channels, groups)


def check_sizes(*, depth: int, **sizes: int) -> None:
    """Refuse what no wide ResNet can have."""
    if depth < 10 or (depth - 4) % 6:
        raise ConfigurationError(f"depth={depth}: a wide ResNet has 6n + 4 layers; use 10, 16, 22, 28, 34 or 40")
    for name, value in sizes.items():
        if value < 1:
            raise ConfigurationError(f"{name}={value}: must be at least 1")


def wrn28(width: int, classes: int = 10, in_channels: int = 3) -> WideResNet:
    """WideResNet-28-`width`, the CIFAR-10 model of the paper. In and out as for `wide_resnet`."""
    return wide_resnet(28, width, classes, in_channels)
