"""What becomes of a cell of Opacus's grids: right, refused in lsg's words, WRONG or crashed."""

from typing import Any

import torch
from torch import Tensor, nn

from lsg import LsgError
from lsg.methods import Method
from tests.support.opacus_grids import Cell
from tests.support.reference import attach, batch_of_one_gradients, project

TOLERANCE = 1e-9  # in float64


def judge(cell: Cell, method: Method) -> tuple[str, str]:
    """The outcome, and why where it is not "right". A private step is taken; before it the per-sample gradients are
    compared with batches of one, of which autograd has the gradients."""
    torch.manual_seed(1)
    try:
        model, batch = cell.make().double(), cell.batch()
        error = _largest_error(model, method, cell, batch)
    except LsgError as refusal:
        return "refused", str(refusal).splitlines()[0]
    except Exception as failure:
        return "crash", f"{type(failure).__name__}: {failure}"[:300]
    return ("right", "") if error < TOLERANCE else ("WRONG", f"error {error:.0e}")


def _largest_error(model: nn.Module, method: Method, cell: Cell, batch: Any) -> float:
    """Relative to the parameter's own gradient, or to the model's where that is all but zero. Takes a step after it."""
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_first": cell.batch_first}
    engine, optimizer, _ = attach(model, method, **options)
    try:
        _loss(model, batch).backward()
        got, spaces = engine.per_sample_gradients(), engine.subspaces
        wanted = batch_of_one_gradients(model, batch, cell.records, _loss)
        error = _compared(got, spaces, wanted)
        optimizer.step()
    finally:
        engine.detach()
    assert all(p.isfinite().all() for p in model.parameters())
    return error


def _compared(got: dict[str, Any], spaces: dict[str, Any], wanted: dict[str, Tensor]) -> float:
    assert set(got) == set(wanted)
    scale, worst = max(float(gradient.norm()) for gradient in wanted.values()), 0.0
    for name, reference in wanted.items():
        expected = project(reference, spaces[name]) if name in spaces else (reference,)
        found = got[name] if name in spaces else (got[name],)
        for one, other in zip(found, expected, strict=True):
            error = (one - other).norm() / max(float(reference.norm()), 1e-3 * scale)
            worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


def _loss(model: nn.Module, batch: Any) -> Tensor:
    """A mean over records, with a gradient that differs everywhere."""
    output = model(batch).flatten(1)
    weights = torch.linspace(-1.0, 2.0, max(1, output[:1].numel()), dtype=output.dtype).cos()
    return ((output * weights).sum(1).square() + output.square().mean(1)).mean()
