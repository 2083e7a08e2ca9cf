"""WideResNet for private training: images (batch, channels, height, width) in, logits (batch, classes) out.

As De et al. (2022), "Unlocking High-Accuracy Differentially Private Image Classification through Scale": standardised
convolutions, and an affine GroupNorm after each ReLU rather than before it.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from lsg.models.standardised_conv import StandardisedConv2d
from lsg.models.wrn import check_sizes


class ReluNormConv(nn.Module):
    """relu-norm-conv: (batch, inputs, h, w) to (batch, outputs, h/stride, w/stride)."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(math.gcd(groups, inputs), inputs)
        self.conv = StandardisedConv2d(inputs, outputs, kernel_size, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(F.relu(x)))


class Block(nn.Module):
    """Two convolutions, plus the input, or a third convolution of it where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.first = ReluNormConv(inputs, outputs, 3, stride, groups)
        self.second = ReluNormConv(outputs, outputs, 3, 1, groups)
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else ReluNormConv(inputs, outputs, 1, stride, groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.second(self.first(x))


class StandardisedWideResNet(nn.Module):
    """Stem, three stages of blocks, relu-norm, global average, linear head. Built by `standardised_wrn`."""

    def __init__(self, blocks: int, width: int, classes: int, in_channels: int, groups: int) -> None:
        super().__init__()
        widths = (16, 16 * width, 32 * width, 64 * width)
        self.stem = StandardisedConv2d(in_channels, widths[0], 3)
        self.stages = nn.Sequential(
            *(
                Block(outputs if block else inputs, outputs, 1 if block else stride, groups)
                for inputs, outputs, stride in zip(widths, widths[1:], (1, 2, 2), strict=False)
                for block in range(blocks)
            )
        )
        self.norm = nn.GroupNorm(math.gcd(groups, widths[3]), widths[3])
        self.head = nn.Linear(widths[3], classes)
        nn.init.trunc_normal_(self.head.weight, std=widths[3] ** -0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.head(self.norm(F.relu(x)).mean(dim=(2, 3)))


def standardised_wrn(
    depth: int = 16, width: int = 4, classes: int = 10, in_channels: int = 3, *, groups: int = 16
) -> StandardisedWideResNet:
    """In and out as for `wide_resnet`. Depth 16 at width 4 has 2.7 million parameters, depth 40 has 8.9 million."""
    check_sizes(depth=depth, width=width, classes=classes, in_channels=in_channels, groups=groups)
    return StandardisedWideResNet((depth - 4) // 6, width, classes, in_channels, groups)
