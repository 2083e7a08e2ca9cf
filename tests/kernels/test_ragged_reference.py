"""Norms and weighted sums in PyTorch's operations, beside double precision."""

import pytest
import torch

from lsg.kernels.ragged_reference import Matrix, row_norms


@pytest.mark.parametrize("width", [1, 1024, 1025, 5000])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-21, 1e-19, 1e-9, 1.0, 1e15, 1e20, 1e37])
def test_norms_are_exact_whatever_the_size(width: int, size: float) -> None:
    values = torch.randn(6, width, generator=torch.Generator().manual_seed(0)) * size
    wanted = values.double().square().sum(1).sqrt()
    torch.testing.assert_close(row_norms(values), wanted, rtol=1e-6, atol=0.0)


def test_a_short_norm_beside_long_ones_is_exact() -> None:
    """An underestimated one would be scaled up beyond the bound where gradients are made of one length."""
    values = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [3e-23], [1e5]])
    torch.testing.assert_close(row_norms(values), values.double().norm(dim=1), rtol=1e-6, atol=0.0)


def test_one_long_number_among_many_short_ones_counts_fully() -> None:
    values = torch.full((2, 10_000), 1e-25)
    values[0, 9_999], values[1, 17] = 1e-6, 2e19
    torch.testing.assert_close(row_norms(values), torch.tensor([1e-6, 2e19], dtype=torch.float64), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("exponent", [10.0, 11.5, 12.0, 12.5, 13.0, 14.0, 14.5])
def test_large_numbers_do_not_swallow_small_ones(exponent: float) -> None:
    values = torch.full((1, 4096), 2**-exponent)
    values.view(-1, 1024)[:, :8] = 1.0
    side_by_side = torch.stack([values[0]] * 2, 1).T  # numbers of a row with others between them
    for given in (values, side_by_side, side_by_side[:, ::2], torch.full((1, 1), 1.42481).expand(1, 2048)):
        torch.testing.assert_close(row_norms(given), given.double().norm(dim=1), rtol=1e-6, atol=0.0)


def test_norms_of_what_is_no_number_are_none_and_those_of_nothing_zero() -> None:
    values = torch.zeros(3, 3000)
    values[0, 2999], values[1, 0] = torch.nan, torch.inf
    norms = row_norms(values)
    assert norms[0].isnan() and norms[1].isinf() and norms[2] == 0.0


def test_norms_of_matrices_have_their_shape() -> None:
    values = torch.randn(2, 3, 2500)
    torch.testing.assert_close(row_norms(values), values.double().norm(dim=2))


def test_a_sample_that_is_left_out_may_be_infinite() -> None:
    values = torch.ones(3, 4)
    values[1] = torch.inf
    assert Matrix(values).weighted_sum(torch.tensor([2.0, 0.0, 1.0])).tolist() == [3.0] * 4
    assert Matrix(values[::2]).weighted_sum(torch.tensor([2.0, 1.0])).tolist() == [3.0] * 4
