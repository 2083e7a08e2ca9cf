"""The model without lsg: whether it runs, whether it keeps records apart, and each record's own gradient.

Nothing here knows lsg's rules: records are fed one by one, with a leading dimension of 1, to ordinary autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.adversarial.records import Batch
from tests.adversarial.trial import Trial

_PERTURBATION = 0.3  # as the noise of some steps would move the weights: gates at zero open


_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)  # of PyTorch, for shapes that do not fit


class PlainFailureError(Exception):
    """The plain model does not run on these batches: the trial says nothing about lsg."""


def tensors(output: Any) -> list[Tensor]:
    """The real-valued tensors of a model's output."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@torch.no_grad()
def perturb(model: nn.Module, generator: torch.Generator, size: float = _PERTURBATION) -> None:
    """Move the trained weights as noise would."""
    for p in model.parameters():
        if p.requires_grad:
            p.add_(size * torch.randn(p.shape, generator=generator, dtype=p.dtype))


@torch.no_grad()
def same_weights(model: nn.Module, trial: Trial) -> nn.Module:
    """A fresh plain model (with nothing remembered from earlier batches) that has the weights of another."""
    fresh = trial.build()
    for own, other in zip(fresh.parameters(), model.parameters(), strict=True):
        own.copy_(other)
    return fresh


def gradient_and_outputs(model: nn.Module, trial: Trial, batch: Batch) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Of one call of the plain model. A parameter that is not reached has a zero gradient."""
    given = batch.clone()
    output = trial.call(model, given)
    loss = trial.loss(output, batch.clone(), trial.reduction)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True) if loss.requires_grad else [None] * 99
    found = {
        name: torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(named.items(), grads, strict=False)
    }
    return found, [t.detach() for t in tensors(output)]


def record_gradients(model: nn.Module, trial: Trial, batch: Batch, mode: bool) -> dict[str, Tensor]:
    """Name -> (B, *shape): each record alone, on a model that has seen no other record."""
    stateless = not any(True for _ in model.buffers())
    alone: list[dict[str, Tensor]] = []
    for i in range(batch.size):
        one = model if stateless and not trial.stateful else same_weights(model, trial)
        alone.append(gradient_and_outputs(one.train(mode), trial, batch.one(i))[0])
    return {name: torch.stack([gradients[name] for gradients in alone]) for name in alone[0]}


def keeps_records_apart(trial: Trial) -> bool:
    """The verdict that lsg is held against: with these weights and with moved ones, on every batch, each record's
    output and gradient are what they are for the record alone, and a NaN record disturbs no other.

    Raises PlainFailureError where the plain model does not run on a batch.
    """
    generator = torch.Generator().manual_seed(trial.seed)
    model = trial.build()
    apart = True
    for moved in (False, True):
        if moved:
            perturb(model, generator)
        sequence = same_weights(model, trial)  # sees all batches, and may remember them
        for batch, mode in zip(trial.batches, trial.all_modes, strict=True):
            try:
                total, outputs = gradient_and_outputs(sequence.train(mode), trial, batch)
            except _ERRORS as error:
                raise PlainFailureError(str(error)) from error
            try:
                apart &= _apart_on(model, trial, batch, mode, outputs, total if moved else None)
            except _ERRORS:  # a record alone cannot be computed (a batch norm says so itself): it needs the others
                apart = False
    return apart and statistics_kept(trial, sequence) is None


def statistics_kept(trial: Trial, model: nn.Module) -> str | None:
    """The name of a buffer that would be another one after other records: it is saved with the weights. `model` has
    seen all batches once."""
    found = dict(model.named_buffers())
    if not found:
        return None
    other = same_weights(model, trial)
    for batch, mode in zip(trial.batches, trial.all_modes, strict=True):
        with torch.no_grad():
            trial.call(other.train(mode), batch.each(_other_records))
    for name, value in other.named_buffers():
        if value.is_floating_point() and not torch.allclose(value, found[name], equal_nan=True):
            return name
    return None


def _other_records(t: Tensor) -> Tensor:
    """Not a multiple or a permutation of these, which a norm or a mean would not notice. Masks stay."""
    if t.is_floating_point():
        return t * t.abs()
    return t if t.dtype == torch.bool else torch.zeros_like(t)


def _apart_on(
    model: nn.Module,
    trial: Trial,
    batch: Batch,
    mode: bool,
    outputs: Sequence[Tensor],
    total: dict[str, Tensor] | None,
) -> bool:
    """outputs, total: of the whole batch; gradients are not compared without `total`."""
    if total is None:
        with torch.no_grad():
            alone = [tensors(trial.call(_fresh(model, trial, mode), batch.one(i))) for i in range(batch.size)]
        return _rows_agree(outputs, alone, batch.size, trial)
    parts = [gradient_and_outputs(_fresh(model, trial, mode), trial, batch.one(i)) for i in range(batch.size)]
    if not _rows_agree(outputs, [part[1] for part in parts], batch.size, trial):
        return False
    share = 1 / batch.size if trial.reduction == "mean" else 1.0
    whole = {name: share * sum(part[0][name] for part in parts) for name in total}
    size = max([float(value.norm()) for value in whole.values()] + [1e-12])
    finite = all(bool(value.isfinite().all()) for value in whole.values())  # else a record is broken, and so is the sum
    if finite and any(not _close(total[name], whole[name], trial.tolerance, size) for name in total):
        return False
    return _broken_record_disturbs_nobody(model, trial, batch, mode, outputs)


def _broken_record_disturbs_nobody(
    model: nn.Module, trial: Trial, batch: Batch, mode: bool, outputs: Sequence[Tensor]
) -> bool:
    if batch.size < 2 or not batch.breakable:
        return True
    victim = batch.size // 2
    with torch.no_grad():
        broken = tensors(trial.call(_fresh(model, trial, mode), batch.broken(victim)))
    others = [i for i in range(batch.size) if i != victim]
    pairs = [(a, b) for a, b in zip(outputs, broken, strict=True) if a.dim() and len(a) == batch.size]
    return all(_close(a[others], b[others], trial.tolerance) for a, b in pairs)


def _fresh(model: nn.Module, trial: Trial, mode: bool) -> nn.Module:
    """The model itself, where it can remember nothing."""
    remembers = trial.stateful or any(True for _ in model.buffers())
    return (same_weights(model, trial) if remembers else model).train(mode)


def _rows_agree(outputs: Sequence[Tensor], alone: Sequence[Sequence[Tensor]], size: int, trial: Trial) -> bool:
    """Row i of each output is what record i alone gives. Outputs without records (a loss, say) are not compared."""
    for number, whole in enumerate(outputs):
        if whole.dim() == 0 or len(whole) != size:
            continue
        if any(len(rows) <= number or rows[number].shape != whole[i : i + 1].shape for i, rows in enumerate(alone)):
            return False  # the shape of a record's output depends on other records
        rows = torch.cat([rows[number] for rows in alone])
        if not _close(whole, rows, trial.tolerance):
            return False
    return True


def _close(a: Tensor, b: Tensor, tolerance: float, size: float | None = None) -> bool:
    """NaN equals NaN."""
    if bool((a.isnan() != b.isnan()).any()):
        return False
    size = max(1e-6, float(b.nan_to_num(0.0, 0.0, 0.0).norm())) if size is None else size
    return float((a - b).nan_to_num(0.0, 0.0, 0.0).norm()) <= tolerance * size
