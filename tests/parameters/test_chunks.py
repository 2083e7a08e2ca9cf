"""Stacks that exist a chunk at a time: the same subspaces and gradients, in memory that does not grow with them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lsg.methods import LSG, Method
from lsg.parameters import matrix_chunks
from lsg.parameters.slot import Layout, Slot
from lsg.parameters.stack import Stack, make_stacks
from lsg.subspace.decompose import decompose
from tests.support.live_bytes import LiveBytes

ROWS, COLUMNS, RANK = 48, 36, 3
ONE = ROWS * COLUMNS * 4  # bytes of a matrix in float32
FACTOR = 8 * RANK * (ROWS + COLUMNS)  # bytes, of one weight in float64, as QR has them on a GPU
IMPORTANCES = ["weight", "factor", "random", "direct"]


def stack_of(count: int, dtype: torch.dtype = torch.float32, *, taps: int = 1) -> Stack:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(ROWS, COLUMNS, generator=generator).to(dtype) for _ in range(count)]
    layout = Layout(transposed=taps == 1, taps=taps)
    (stack,) = make_stacks(Slot(str(i), nn.Parameter(w), layout) for i, w in enumerate(weights))
    return stack


def tensors(stack: Stack) -> Iterator[Tensor]:
    for slot in stack.slots:
        space = slot.subspace
        assert space is not None
        yield from (space.left, space.right, space.left_mask, space.right_mask)


def refreshed(stack: Stack, method: Method) -> list[Tensor]:
    """Subspaces, masks and lifted gradients, all of it."""
    stack.refresh(method, 0.4, torch.Generator().manual_seed(0))
    vector = torch.randn(stack.dimensions, generator=torch.Generator().manual_seed(2))
    return [*tensors(stack), *(gradient for _, gradient in stack.lift(vector))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("importance", IMPORTANCES)
def test_chunks_change_no_subspace_and_no_gradient(
    importance: Any, taps: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = LSG(rank=RANK, sparsity=0.4, importance=importance)
    whole = refreshed(stack_of(7, dtype, taps=taps), method)
    monkeypatch.setattr(matrix_chunks, "CHUNK_BYTES", 2 * ONE * (2 if dtype == torch.float64 else 1))
    chunked = refreshed(stack_of(7, dtype, taps=taps), method)  # two at a time, and one that is left
    monkeypatch.setattr(matrix_chunks, "CHUNK_BYTES", 1)
    single = refreshed(stack_of(7, dtype, taps=taps), method)
    for a, b, c in zip(whole, chunked, single, strict=True):
        assert a.dtype == b.dtype == c.dtype
        assert torch.equal(a, b) if a.dtype == torch.bool else (a - b).abs().max() <= 1e-6
        assert torch.equal(a, c) if a.dtype == torch.bool else (a - c).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_that_fits_is_decomposed_as_one_tensor_to_the_bit(dtype: torch.dtype) -> None:
    stack = stack_of(5, dtype)
    stack.refresh(LSG(rank=RANK, sparsity=0.4), 0.4, torch.Generator().manual_seed(0))
    whole = torch.stack([slot.value for slot in stack.slots]).float()
    left, right = decompose(whole.mT, RANK, torch.Generator().manual_seed(0))
    for i, slot in enumerate(stack.slots):
        assert slot.subspace is not None
        assert torch.equal(slot.subspace.left, left[i]) and torch.equal(slot.subspace.right, right[i])


def test_float32_is_precise_enough_for_bfloat16_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 finds the subspaces of weights to 1e-5, which their rounding to bfloat16 has moved by more than 1e-3."""
    monkeypatch.setattr(matrix_chunks, "CHUNK_BYTES", 1)
    stack = stack_of(4, torch.bfloat16)
    stack.refresh(LSG(rank=RANK, sparsity=0.4), 0.4, torch.Generator().manual_seed(0))
    start = torch.randn(4, ROWS, RANK, generator=torch.Generator().manual_seed(0)).double()
    exact = torch.stack([slot.value for slot in stack.slots]).double().mT
    rounded = (exact * (1 + 2.0**-9 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(3)))).double()
    angles = []
    for weights in (exact, rounded):
        left = torch.linalg.qr(weights @ start).Q
        right = torch.linalg.qr(weights.mT @ left).Q
        found = [(s.subspace.left.double(), s.subspace.right.double().mT) for s in stack.slots if s.subspace]
        sines = [
            torch.linalg.matrix_norm(own - truth[i] @ (truth[i].mT @ own), ord=2)
            for i, both in enumerate(found)
            for own, truth in zip(both, (left, right), strict=True)
        ]
        angles.append(float(torch.stack(sines).max()))
    for slot in stack.slots:
        assert slot.subspace is not None
        for q in (slot.subspace.left, slot.subspace.right.mT):
            assert (q.double().mT @ q.double() - torch.eye(RANK)).abs().max() < 1e-6
    assert angles[0] < 1e-5 < 1e-3 < angles[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_a_refresh_is_a_chunk_and_the_factors(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_chunks, "CHUNK_BYTES", 2 * ONE)
    for count in (4, 32):
        stack = stack_of(count, dtype)
        with LiveBytes() as live:
            stack.refresh(LSG(rank=RANK, sparsity=0.4), 0.4, torch.Generator().manual_seed(0))
        assert live.peak <= 2 * ONE + 4 * count * FACTOR
    assert live.peak < count * ONE / 2  # what it would be in one piece is twice as much and more


@pytest.mark.parametrize("importance", ["weight", "direct"])
def test_memory_of_a_lift_is_a_chunk_and_the_factors(importance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_chunks, "CHUNK_BYTES", 2 * ONE)
    stack = stack_of(32)
    stack.refresh(LSG(rank=RANK, sparsity=0.4, importance=importance), 0.4, torch.Generator().manual_seed(0))
    vector = torch.randn(stack.dimensions)
    with LiveBytes() as live:
        for _, gradient in stack.lift(vector):
            del gradient
    masks_of_one_weight = 10 * ONE if importance == "direct" else 0  # indices of 8 bytes, some times over
    assert 2 * ONE <= live.peak <= 2 * ONE + 8 * FACTOR + masks_of_one_weight


def test_live_bytes_counts_what_is_held_and_what_is_let_go() -> None:
    before = torch.zeros(100)
    with LiveBytes() as live:
        a = torch.ones(1000)
        view = a[10:].view(-1, 10)
        before.add_(1)
        b = a + 1
        assert (live.now, live.peak) == (8000, 8000)
        del a, b
        assert live.now == 4000  # the view holds it
        del view
        assert live.now == 0 and live.peak == 8000
