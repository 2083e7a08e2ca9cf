"""Stacks of same-shaped weights: what slots get from them."""

import pytest
import torch
from torch import nn

from lsg.methods import LSG
from lsg.parameters.slot import Layout, Slot
from lsg.parameters.stack import make_stacks


@pytest.mark.parametrize("taps", [1, 9])
@pytest.mark.parametrize(("rows", "channels", "rank"), [(7, 5, 1), (5, 9, 3), (64, 64, 8)])
def test_whatever_a_compiled_layer_reads_starts_at_a_multiple_of_16_bytes(
    rows: int, channels: int, rank: int, taps: int
) -> None:
    """Compiled code loads 16 bytes at once where the tensor that it was compiled with allowed that."""
    slots = [
        Slot(str(i), nn.Parameter(torch.randn(rows, channels * taps)), Layout(transposed=taps == 1, taps=taps))
        for i in range(4)
    ]
    (stack,) = make_stacks(slots)
    stack.refresh(LSG(rank=rank, sparsity=0.4), 0.4, torch.Generator().manual_seed(0))
    for slot in slots:
        space = slot.subspace
        assert space is not None and space.left_kept is not None and space.right_kept is not None
        kept = (space.left_kept, space.right_kept)
        for tensor in (space.left, space.right, *(t for k in kept for t in (k.indices, k.place))):
            assert tensor.storage_offset() * tensor.element_size() % 16 == 0
        for k in kept:
            assert torch.equal(k.indices, (k.place >= 0).nonzero().flatten())
            assert torch.equal(k.place[k.indices], torch.arange(len(k.indices), dtype=torch.int32))
