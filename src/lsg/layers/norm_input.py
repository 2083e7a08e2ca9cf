"""What layer norms and group norms share: in which precision they run, and the carriers of scale and shift."""

import torch
from torch import Tensor

from lsg.layers.patched_module import PatchedModule


def carrier_of(patched: PatchedModule, name: str) -> Tensor | None:
    """Of a scale or a shift, by its local name; None where it is not trained."""
    slot = patched.slots.get(name)
    return slot.carriers[0] if slot else None


def norm_dtype(x: Tensor) -> torch.dtype:
    """Norms run in float32 under autocast, as PyTorch's own do on a GPU."""
    lower = torch.is_autocast_enabled(x.device.type) and x.dtype.itemsize < 4
    return torch.float32 if lower else x.dtype


def norm_input(x: Tensor) -> Tensor:
    return x.to(norm_dtype(x))
