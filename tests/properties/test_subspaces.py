"""For any weights, all zero, huge or denormal: factors are orthonormal and masks keep exactly what they should."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lsg import LSG, SparseDPSGD
from lsg.methods import Method
from lsg.subspace.decompose import cholesky_qr, decompose
from lsg.subspace.importance import kept_count, top_indices
from tests.support.architectures import DETERMINISTIC, Blueprint, blueprints, mean_loss, methods
from tests.support.reference import attach

SCALES = (0.0, 1e-45, 1e-38, 1e-20, 1.0, 1e15, 1e30)


def matrices(draw_shape: tuple[int, int, int], true_rank: int, scale: float, dtype: torch.dtype, seed: int) -> Tensor:
    """A stack of matrices of at most that rank."""
    k, m, n = draw_shape
    generator = torch.Generator().manual_seed(seed)
    tall = torch.randn(k, m, true_rank, generator=generator, dtype=torch.float64)
    wide = torch.randn(k, true_rank, n, generator=generator, dtype=torch.float64)
    return (tall @ wide * scale).to(dtype)


hostile_matrices = st.builds(
    matrices,
    st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12)),
    st.integers(0, 6),
    st.sampled_from(SCALES),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 9),
)


def off_identity(columns: Tensor) -> float:
    products = columns.double().mT @ columns.double()
    return float((products - torch.eye(columns.shape[-1], dtype=torch.float64)).abs().max())


@settings(DETERMINISTIC, max_examples=150)
@given(hostile_matrices, st.integers(1, 20), st.integers(0, 9))
def test_factors_are_orthonormal_for_any_weights_and_any_rank(weights: Tensor, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right = decompose(weights, rank, generator)
    k, m, n = weights.shape
    rank = min(rank, m, n)
    assert left.shape == (k, m, rank) and right.shape == (k, rank, n)
    assert off_identity(left) < 1e-5 and off_identity(right.mT) < 1e-5


@settings(DETERMINISTIC, max_examples=150)
@given(hostile_matrices, st.integers(0, 9))
def test_the_accelerators_factorisation_is_orthonormal_too(columns: Tensor, seed: int) -> None:
    """CholeskyQR2, which an accelerator uses, on columns that depend on each other."""
    columns = columns if columns.shape[1] >= columns.shape[2] else columns.mT
    found = cholesky_qr(columns, torch.Generator().manual_seed(seed))
    assert off_identity(found) < 1e-5


@pytest.mark.parametrize(("rows", "columns"), [(4096, 64), (64, 64), (20000, 8)])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e30])
def test_the_accelerators_factorisation_survives_dependent_columns_of_real_sizes(
    rows: int, columns: int, scale: float
) -> None:
    """A weight of rank one and a subspace of rank 64: without a shift the factors had entries of 1e39."""
    deficient = matrices((1, rows, columns), 1, scale, torch.float32, 0)
    assert off_identity(cholesky_qr(deficient, torch.Generator().manual_seed(0))) < 1e-6


@settings(DETERMINISTIC, max_examples=60)
@given(
    blueprints(),
    methods(),
    st.sampled_from([0.0, 1e-40, 1e30]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_masks_keep_exactly_the_right_number_whatever_the_weights(
    plan: Blueprint, method: Method, scale: float, dtype: torch.dtype
) -> None:
    """Ties (all-zero weights) and overflowing sums of absolute values must not change how much is trained."""
    model = plan.build(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    engine, _, _ = attach(model, method)
    sparsity = method.sparsity_at(0)
    for name, slot in engine._recorder.ready().items():
        space = slot.subspace
        if space is None:
            if slot.maskable:
                kept = slot.value.numel() if slot.elements_kept is None else len(slot.elements_kept.unique())
                assert kept == kept_count(slot.value.numel(), sparsity), name
            continue
        if method.importance == "direct":
            assert space.left_mask.all() and space.right_mask.all()
            lifted = top_indices(slot.value.abs().flatten(), sparsity)
            kept = slot.value.numel() if lifted is None else len(lifted.unique())
            assert kept == kept_count(slot.value.numel(), sparsity), name
            continue
        rows, columns = (space.right_mask, space.left_mask) if space.transposed else (space.left_mask, space.right_mask)
        taps = slot.layout.taps
        assert int(rows.sum()) == kept_count(len(rows), sparsity), name
        assert int(columns.sum()) == taps * kept_count(len(columns) // taps, sparsity), name
        assert slot.dimensions == space.rank * int(rows.sum() + columns.sum()), name


@settings(DETERMINISTIC, max_examples=40)
@given(st.integers(1, 400), st.floats(0, 0.9999))
def test_the_share_kept_is_one_minus_the_sparsity_and_never_none(size: int, sparsity: float) -> None:
    kept = kept_count(size, sparsity)
    assert 1 <= kept <= size
    assert kept == 1 or abs(kept - (1 - sparsity) * size) < 1


@settings(DETERMINISTIC, max_examples=30)
@given(blueprints(), st.sampled_from([0.0, 1e-40, 1e15]), st.booleans())
def test_training_goes_on_from_any_weights(plan: Blueprint, scale: float, sparse: bool) -> None:
    """All-zero weights have no row or column space; the step is still taken, and it is finite."""
    assume(not plan.ambiguous(3))
    method = SparseDPSGD(sparsity=0.9) if sparse else LSG(rank=2, sparsity=0.9, project=("*weight",))
    model = plan.build(torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    engine, optimizer, _ = attach(model, method, noise_multiplier=1.0, max_grad_norm=1.0)
    for _ in range(2):
        mean_loss(model, plan.samples(3, torch.float32)).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert len(engine.accountant) == 2
