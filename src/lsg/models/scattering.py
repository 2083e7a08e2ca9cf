"""Scattering transform: images (batch, channels, height, width) in, fixed features (batch, 81 channels, h/4, w/4) out.

Two layers of Morlet wavelets with a modulus in between, averaged over 4 x 4 pixels (Oyallon and Mallat, 2015): J = 2
scales, L = 8 angles. Nothing of it is learnt, and nothing depends on data. Filters and padding are those of kymatio;
values differ by 0.3 %, as it averages maps of half the resolution with a Gaussian that it cuts off in frequency.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.errors import ConfigurationError

SCALES, ANGLES = 2, 8
FEATURES = 1 + SCALES * ANGLES + ANGLES**2  # averages; one wavelet; one of scale 1 after one of scale 0
STRIDE = 2**SCALES
AVERAGE = 0.8 * 2 ** (SCALES - 1)  # deviation of the Gaussian that averages, in pixels
SMALLEST_IMAGE = 8


class Scattering(nn.Module):
    """The transform for images of one size, in float32 whatever the precision around it."""

    # Not saved: they follow from the size. Wavelets by their spectra, averages over rows and columns as matrices.
    fine: Tensor
    coarse: Tensor
    mean_rows: Tensor
    mean_columns: Tensor

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        if min(height, width) < SMALLEST_IMAGE:
            raise ConfigurationError(
                f"images of {height} x {width}: scattering needs {SMALLEST_IMAGE} x {SMALLEST_IMAGE} pixels or more"
            )
        rows, columns = (((size + STRIDE) // STRIDE + 1) * STRIDE for size in (height, width))
        spare = rows - height, columns - width
        self.padding = [spare[1] // 2, spare[1] - spare[1] // 2, spare[0] // 2, spare[0] - spare[0] // 2]
        for name, scale in (("fine", 0), ("coarse", 1)):
            wavelets = torch.stack([_morlet(rows, columns, scale, angle) for angle in range(ANGLES)])
            self.register_buffer(name, wavelets.float(), persistent=False)
        for name, size in (("mean_rows", rows), ("mean_columns", columns)):
            self.register_buffer(name, _averages(size).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            padded = F.pad(x.to(self.fine.dtype), self.padding, mode="reflect").unsqueeze(2)
            image = torch.fft.fft2(padded)  # (batch, channels, filters, rows, columns)
            fine = torch.fft.ifft2(image * self.fine).abs()
            coarse = _every_second(image, self.coarse).abs()
            both = _every_second(torch.fft.fft2(fine).unsqueeze(3), self.coarse).abs().flatten(2, 3)
            found = [self._averaged(maps) for maps in (padded, fine, coarse, both)]
            return torch.cat(found, 2).flatten(1, 2)

    def _averaged(self, maps: Tensor) -> Tensor:
        """Of whole or half resolution -> of a quarter, without the padding."""
        step = self.fine.shape[-1] // maps.shape[-1]
        in_rows = F.linear(maps, self.mean_columns[:, ::step] * step)
        return F.linear(in_rows.mT, self.mean_rows[:, ::step] * step).mT


def _every_second(spectrum: Tensor, filters: Tensor) -> Tensor:
    """Every second pixel of what the filters make of this spectrum."""
    numbers, rows, columns = torch.view_as_real(spectrum), filters.shape[-2] // 2, filters.shape[-1] // 2
    parts = [(..., y, x) for y in (slice(rows), slice(rows, None)) for x in (slice(columns), slice(columns, None))]
    folded = torch.zeros((), device=numbers.device)
    for part in parts:
        folded = folded + numbers[*part, slice(None)] * filters[part].unsqueeze(-1) / 4
    return torch.fft.ifft2(torch.view_as_complex(folded))


def _averages(size: int) -> Tensor:
    """(size/4 - 2, size): Gaussian averages around every fourth pixel of a row, those in the padding left out."""
    row = _periodic(torch.exp(-(_places(size) ** 2) / (2 * AVERAGE**2)), size) / (math.sqrt(2 * math.pi) * AVERAGE)
    centres = torch.arange(STRIDE, size - STRIDE, STRIDE).view(-1, 1)
    return row[(torch.arange(size) - centres) % size]


def _morlet(rows: int, columns: int, scale: int, angle: int) -> Tensor:
    """A wave under a Gaussian, without its mean: the spectrum of wavelet number `angle`."""
    theta, slant = (ANGLES // 2 - 1 - angle) * math.pi / ANGLES, 4 / ANGLES
    size, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
    y, x = _places(rows).view(-1, 1), _places(columns)
    along, across = y * math.cos(theta) + x * math.sin(theta), x * math.cos(theta) - y * math.sin(theta)
    hill = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * size**2)) * slant / (2 * math.pi * size**2)
    wave = hill * torch.exp(1j * frequency * along)
    wavelet = wave - wave.sum() / hill.sum() * hill
    # Real, as the wavelet at -u is its conjugate at u.
    return torch.fft.fft2(_periodic(_periodic(wavelet, columns).mT, rows).mT).real


def _places(size: int) -> Tensor:
    """Pixels around number 0, over five periods."""
    return torch.arange(-2 * size, 3 * size, dtype=torch.double)


def _periodic(values: Tensor, size: int) -> Tensor:
    """Five periods of the last dimension, added up."""
    return values.unflatten(-1, (5, size)).sum(-2)
