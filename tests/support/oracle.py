"""What the engine has to agree with, for any model: batch-of-one gradients on the engine's own subspaces."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lsg import PrivacyEngine
from tests.support.architectures import mean_loss
from tests.support.reference import batch_of_one_gradients, project


def wanted_gradients(model: nn.Module, engine: PrivacyEngine, batch: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """What `in_trained_space` makes of each sample's own gradients."""
    return in_trained_space(engine, batch_of_one_gradients(copy.deepcopy(model), batch, len(batch), mean_loss))


def in_trained_space(engine: PrivacyEngine, gradients: dict[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Per-sample gradients by parameter in; by slot out: (dense) or (of L, of R), masked entries zero."""
    assert engine._recorder is not None
    wanted: dict[str, tuple[Tensor, ...]] = {}
    for name, slot in engine._recorder.slots.items():
        gradient = gradients[name.partition("[")[0]]
        if slot.narrow is not None:  # a third of a fused weight
            dimension, start, size = slot.narrow
            gradient = gradient.narrow(dimension + 1, start, size)
        if slot.subspace is not None:
            wanted[name] = project(gradient, slot.subspace)
        elif slot.elements_kept is not None:
            mask = torch.zeros(gradient[0].numel(), dtype=torch.bool).index_fill(0, slot.elements_kept, True)
            wanted[name] = (gradient * mask.view(gradient.shape[1:]),)
        else:
            wanted[name] = (gradient,)
    return wanted


def found_gradients(engine: PrivacyEngine) -> dict[str, tuple[Tensor, ...]]:
    found: dict[str, Any] = engine.per_sample_gradients()
    return {name: value if isinstance(value, tuple) else (value,) for name, value in found.items()}


def assert_close(found: dict[str, tuple[Tensor, ...]], wanted: dict[str, tuple[Tensor, ...]], tolerance: float) -> None:
    """Relative to each sample's whole gradient."""
    assert set(found) == set(wanted)
    size = sum(part.double().reshape(len(part), -1).square().sum(1) for parts in wanted.values() for part in parts)
    assert isinstance(size, Tensor)
    for name, parts in wanted.items():
        for one, other in zip(found[name], parts, strict=True):
            error = (one.double() - other.double()).reshape(len(one), -1).norm(dim=1)
            worst = float((error / (size.sqrt() + 1e-12)).max())
            assert worst < tolerance, f"{name}: {worst:.1e}"
