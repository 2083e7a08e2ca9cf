"""Convolution with standardised weights: images (batch, in, height, width) in, (batch, out, height', width') out.

Each output channel's weights are used without their mean and scaled to length `gain`, which is trained, too (Brock et
al., 2021, "Characterizing signal propagation"). Only the direction of a kernel matters, so that noise on it costs less
the longer it has grown. `lsg.layers.standardised_conv` has the rule for its per-sample gradients.
"""

import torch
from torch import Tensor, nn

SMALLEST_SQUARE = 1e-4  # kernels shorter than its root are taken to have that length


class StandardisedConv2d(nn.Conv2d):
    """Zero-padded, ungrouped, with a bias."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel_size, stride=stride, padding=kernel_size // 2)
        self.gain = nn.Parameter(torch.ones(outputs))
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def directions(self) -> tuple[Tensor, Tensor, Tensor]:
        """(out, in * taps): kernels without mean, of length 1. (out): their length before, and whether it was enough to
        divide by."""
        matrix = self.weight.flatten(1)
        centred = matrix - matrix.mean(1, keepdim=True)
        squares = centred.square().sum(1)
        length = squares.clamp_min(SMALLEST_SQUARE).sqrt()
        return centred / length.unsqueeze(1), length, squares > SMALLEST_SQUARE

    def forward(self, input: Tensor) -> Tensor:
        direction, _, _ = self.directions()
        kernel = (direction * self.gain.unsqueeze(1)).view_as(self.weight)
        return self._conv_forward(input, kernel, self.bias)
