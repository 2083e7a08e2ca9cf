"""Augmentation multiplicity: encoded images in, the same with several randomly moved views of each record out.

The views of a record are adjacent rows. The engine averages their gradients before the clip (`make_private(views=K)`),
so that a record counts once, however many views it has (De et al., 2022).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lsg.tasks.encoded import EncodedImages
from lsg.tasks.padded import Indices, on_device

SHARE_MOVED = 8  # an image moves by up to an eighth of its size: 4 pixels of 32


@dataclass(frozen=True)
class ImageViews:
    """views: of each record. flip: half of them mirrored, left to right.

    Moves and flips come from torch's global random stream on the images' device, which a checkpoint keeps: a run that
    is continued sees the views that it would have seen.
    """

    images: EncodedImages
    views: int
    flip: bool

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """One batch of len(indices) * views rows."""
        pixels = self.images.pixels
        rows = on_device(pixels.device, torch.as_tensor(indices)).repeat_interleave(self.views)
        y, x = (_moved(size, len(rows), pixels.device) for size in pixels.shape[2:])
        if self.flip:
            mirrored = torch.rand(len(rows), 1, device=pixels.device) < 0.5
            x = torch.where(mirrored, x.flip(1), x)
        channels = torch.arange(pixels.shape[1], device=pixels.device)
        chosen = pixels[rows[:, None, None, None], channels[:, None, None], y[:, None, :, None], x[:, None, None, :]]
        return self.images.normalised(chosen), self.images.labels.index_select(0, rows)


def _moved(size: int, count: int, device: torch.device) -> Tensor:
    """(count, size): which pixel of a row or column of `size` comes where, reflected at the borders."""
    most = size // SHARE_MOVED
    move = torch.randint(-most, most + 1, (count, 1), device=device)
    places = (torch.arange(size, device=device) + move).abs()
    return torch.where(places < size, places, 2 * (size - 1) - places)
