"""Rows of token ids, of unequal length, as one matrix on a device: indices in, a batch as wide as it must be out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH_STEP = 8  # texts are padded to a multiple of it: few shapes to compile, and tensor cores like them
CHUNK = 4096  # texts tokenized at a time, between two reports of progress

Indices = Sequence[int] | Tensor


@dataclass(frozen=True)
class PaddedTokens:
    """ids (n, width) on the device. lengths (n,) are on the host: loaders sort by them."""

    ids: Tensor
    lengths: Tensor

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """(ids, attention mask), as wide as the longest of these rows needs."""
        chosen = torch.as_tensor(indices)
        width = min(rounded_up(int(self.lengths[chosen].max())), self.ids.shape[1])
        rows = on_device(self.ids.device, chosen)
        lengths = on_device(self.ids.device, self.lengths[chosen])
        mask = torch.arange(width, device=lengths.device) < lengths[:, None]
        return self.ids[:, :width].index_select(0, rows).long(), mask.long()


def padded(rows: list[list[int]], most: int, padding: int, device: torch.device) -> PaddedTokens:
    """most: what no row is longer than, and the matrix no wider than: a model may have no positions past it."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    width = min(rounded_up(int(lengths.max())), most)
    return PaddedTokens(matrix(rows, lengths, width, padding).to(device), lengths)


def matrix(rows: list[list[int]], lengths: Tensor, width: int, padding: int) -> Tensor:
    """Rows of unequal length, padded on the right."""
    found = torch.full((len(rows), width), padding, dtype=torch.int32)
    filled = torch.arange(width) < lengths[:, None]
    found[filled] = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
    return found


def rounded_up(length: int) -> int:
    return -(-length // WIDTH_STEP) * WIDTH_STEP


def on_device(device: torch.device, indices: Tensor) -> Tensor:
    """Copied without waiting for what the device still computes."""
    return indices.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else indices
