"""Orthonormal factors by both routes, for good weights and bad ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lsg.subspace.decompose import cholesky_qr, decompose, orthonormal
from lsg.subspace.importance import kept_count, top_indices

ROUTES = [orthonormal, cholesky_qr]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def stack_of(kind: str, dtype: torch.dtype) -> Tensor:
    columns = torch.randn(3, 40, 6, generator=generator(), dtype=dtype)
    if kind == "zero":
        columns[1] = 0
    elif kind == "rank_deficient":
        columns[:, :, 3:] = columns[:, :, :3]
    elif kind == "huge_and_tiny":
        columns[0] *= 1e18
        columns[1] *= 1e-18
    elif kind == "ill_conditioned":
        columns[:, :, 5] = columns[:, :, 4] + 1e-5 * columns[:, :, 5]
    return columns


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "zero", "rank_deficient", "huge_and_tiny", "ill_conditioned"])
def test_columns_are_orthonormal(route: Callable[..., Tensor], kind: str, dtype: torch.dtype) -> None:
    q = route(stack_of(kind, dtype), generator())
    assert q.dtype == dtype
    assert (q.mT @ q - torch.eye(6, dtype=dtype)).abs().max() < 1e-6


def test_both_routes_give_the_same_columns() -> None:
    columns = stack_of("random", torch.float64)
    one, other = orthonormal(columns, generator()), cholesky_qr(columns, generator())
    assert (one - other).abs().max() < 1e-5


@pytest.mark.parametrize("route", ROUTES)
def test_rounding_in_a_row_of_zeros_does_not_flip_signs(route: Callable[..., Tensor]) -> None:
    above, below = stack_of("random", torch.float32), stack_of("random", torch.float32)
    above[:, 0], below[:, 0] = 1e-9, -1e-9  # a padding token's embedding, after some training
    assert (route(above, generator()) - route(below, generator())).abs().max() < 1e-5


def test_the_start_is_fresh_each_time_and_rank_is_cut_to_the_matrix() -> None:
    weights, stream = torch.randn(2, 5, 9), generator()
    first, second = decompose(weights, 3, stream), decompose(weights, 3, stream)
    assert not torch.allclose(first[0], second[0])
    left, right = decompose(weights, 20, stream)
    assert left.shape == (2, 5, 5) and right.shape == (2, 5, 9)


@pytest.mark.parametrize(("size", "sparsity", "kept"), [(10, 0.3, 7), (100, 0.29, 71), (7, 0.5, 4), (3, 0.999, 1)])
def test_the_lowest_fraction_is_masked_and_one_unit_always_stays(size: int, sparsity: float, kept: int) -> None:
    assert kept_count(size, sparsity) == kept
    scores = torch.randperm(size, generator=generator()).float()
    indices = top_indices(scores, sparsity)
    assert indices is not None
    assert set(scores[indices].tolist()) == set(range(size - kept, size))
    assert torch.equal(indices, indices.sort().values)


def test_no_sparsity_needs_no_indices() -> None:
    assert top_indices(torch.rand(5), 0.0) is None
