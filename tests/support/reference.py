"""Batch-of-one references: what the engine's per-sample gradients and updates have to equal, computed naively."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import PrivacyEngine
from lsg.methods import Method
from lsg.subspace import Subspace

Loss = Callable[[nn.Module, Any], Tensor]  # (model, samples) -> mean loss over the samples


def attach(model: nn.Module, method: Method, *, batch_size: int = 4, lr: float = 1.0, **options: Any) -> Any:
    """An engine on the model with no noise and no clipping to speak of, unless told otherwise."""
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=batch_size)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 1e9} | options
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, method=method, **settings
    )
    return engine, optimizer, loader


def slice_sample(batch: Any, i: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[i : i + 1]
    if isinstance(batch, dict):
        return {key: slice_sample(value, i) for key, value in batch.items()}
    return tuple(slice_sample(value, i) for value in batch)


def batch_of_one_gradients(model: nn.Module, batch: Any, size: int, loss: Loss) -> dict[str, Tensor]:
    """Name -> (B, *shape): one ordinary backward pass for each sample on a plain copy of the model."""
    plain = copy.deepcopy(model)
    samples: dict[str, list[Tensor]] = {name: [] for name, _ in plain.named_parameters()}
    for i in range(size):
        plain.zero_grad()
        loss(plain, slice_sample(batch, i)).backward()
        for name, p in plain.named_parameters():
            samples[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {name: torch.stack(grads) for name, grads in samples.items()}


def paper_matrix(gradient: Tensor, space: Subspace) -> Tensor:
    """(B, *shape) -> (B, m, n) in the paper's orientation."""
    matrix = gradient.flatten(2) if gradient.dim() > 2 else gradient
    return matrix.mT if space.transposed else matrix


def project(gradient: Tensor, space: Subspace) -> tuple[Tensor, Tensor]:
    """Eq. 4 with the masks: dL = dW R^T, dR = L^T dW."""
    w = paper_matrix(gradient, space).to(space.left.dtype)
    d_left, d_right = w @ space.right.T, space.left.T @ w
    return d_left * space.left_mask[:, None], d_right * space.right_mask


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def assert_per_sample_gradients(
    model: nn.Module, method: Method, batch: Any, size: int, loss: Loss, tolerance: float = 1e-10
) -> dict[str, Any]:
    """The engine's per-sample gradients equal the projected batch-of-one gradients. Returns the engine's."""
    torch.manual_seed(0)
    engine, optimizer, _ = attach(model, method)
    loss(model, batch).backward()
    got, spaces = engine.per_sample_gradients(), engine.subspaces
    wanted = batch_of_one_gradients(model, batch, size, loss)
    assert set(got) == set(wanted)
    scale = max(float(g.norm()) for g in wanted.values())
    for name, reference in wanted.items():
        kept = engine._recorder.slots[name].elements_kept
        if kept is not None:  # Sparse DPSGD: the elements that are largest in absolute value, and no others
            magnitude = dict(model.named_parameters())[name].detach().abs().flatten()
            mask = torch.zeros_like(magnitude).index_fill(0, kept, 1.0)
            assert magnitude[mask == 1].min() >= magnitude[mask == 0].max()
            reference = reference * mask.view(reference.shape[1:])
        expected = project(reference, spaces[name]) if name in spaces else (reference,)
        found = got[name] if name in spaces else (got[name],)
        for one, other in zip(found, expected, strict=True):
            # Relative to the parameter's own gradient, or to the whole model's where that one is all but zero.
            error = (one.double() - other.double()).norm() / max(float(reference.norm()), 1e-3 * scale)
            assert error < tolerance, f"{name}: relative error {float(error):.1e}"
    optimizer.zero_grad()
    engine.detach()
    return got
