"""For any model, batches and draws: one accounted, finite, noisy step a logical batch, on kept entries alone."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lsg import PrivacyEngine, PrivacyError
from lsg.methods import Method
from lsg.subspace.importance import top_indices
from tests.support.architectures import DETERMINISTIC, Blueprint, blueprints, mean_loss, methods
from tests.support.reference import attach

RECORDS, EXPECTED = 8, 2


def training(
    plan: Blueprint, method: Method, draws: list[list[int]], physical: int | None, **options: Any
) -> tuple[Any, PrivacyEngine, list[int], list[int]]:
    """An epoch over chosen logical batches. Returns also the sizes of micro-batches and of the released vectors."""
    model = plan.build(torch.float32)
    data = plan.samples(RECORDS, torch.float32)
    engine = PrivacyEngine(accountant="rdp")
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "noise_generator": torch.Generator().manual_seed(0)}
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data), batch_size=EXPECTED),
        method=method,
        max_physical_batch_size=physical,
        **settings | options,
    )
    loader.logical._draw = lambda count: [torch.tensor(draw, dtype=torch.long) for draw in draws]
    released: list[int] = []
    release = optimizer.gradients.release

    def spy(noise_multiplier: float) -> None:
        released.append(sum(slot.dimensions for slot in optimizer.gradients.recorder.ready().values()))
        release(noise_multiplier)

    optimizer.gradients.release = spy
    sizes = []
    for (batch,) in loader:
        sizes.append(len(batch))
        mean_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, engine, sizes, released


logical_batches = st.lists(
    st.lists(st.integers(0, RECORDS - 1), max_size=RECORDS, unique=True), min_size=1, max_size=4
)  # some of them empty


@settings(DETERMINISTIC, max_examples=50)
@given(blueprints(), methods(), logical_batches, st.sampled_from([None, 1, 3]))
def test_each_logical_batch_is_one_finite_accounted_step(
    plan: Blueprint, method: Method, draws: list[list[int]], physical: int | None
) -> None:
    """An empty draw too; and whatever the size of micro-batches."""
    sizes = [len(draw) if physical is None else min(len(draw), physical) for draw in draws]
    assume(not any(plan.ambiguous(size) for size in {*sizes, *(len(d) % (physical or 99) for d in draws)}))
    model, engine, seen, released = training(plan, method, draws, physical)
    assert sum(seen) == sum(len(draw) for draw in draws) and 0 not in seen
    assert len(engine.accountant) == len(released) == len(draws)
    assert [(phase.noise_multiplier, phase.sample_rate) for phase in engine.accountant.history] == [
        (1.0, EXPECTED / RECORDS)
    ]
    for p in model.parameters():
        assert p.isfinite().all()


@settings(DETERMINISTIC, max_examples=30)
@given(blueprints(), methods(), st.lists(st.integers(0, RECORDS - 1), min_size=2, max_size=6, unique=True))
def test_micro_batches_do_not_change_a_step(plan: Blueprint, method: Method, draw: list[int]) -> None:
    assume(not any(plan.ambiguous(size) for size in (len(draw), 2)))
    finals = [list(training(plan, method, [draw, [], draw], size)[0].parameters()) for size in (None, 1, 2)]
    for other in finals[1:]:
        for p, q in zip(finals[0], other, strict=True):
            assert torch.allclose(p, q, atol=1e-4)


@settings(DETERMINISTIC, max_examples=50)
@given(blueprints(), methods(), st.integers(0, 3))
def test_noise_reaches_kept_entries_and_no_others(plan: Blueprint, method: Method, size: int) -> None:
    """A released vector has room for kept entries alone, and what is lifted from noise leaves masked entries at zero.
    A batch of no samples gets the noise as any other."""
    assume(not plan.ambiguous(size))
    model = plan.build(torch.float64)
    engine, optimizer, _ = attach(
        model, method, noise_multiplier=1.0, max_grad_norm=1.0, noise_generator=torch.Generator().manual_seed(1)
    )
    slots = engine._recorder.ready()
    dimensions = sum(slot.dimensions for slot in slots.values())
    vectors: list[Tensor] = []
    lift = engine._recorder.lift

    def spy(vector: Tensor) -> Any:
        vectors.append(vector)
        return lift(vector)

    engine._recorder.lift = spy
    kept = {name: _reachable(slot, method) for name, slot in slots.items()}
    if size:
        mean_loss(model, plan.samples(size)).backward()
    optimizer.step()
    assert len(vectors) == 1 and vectors[0].shape == (dimensions,)
    assert (vectors[0] != 0).all()  # noise on each of them
    for name, slot in slots.items():
        gradient = slot.parameter.grad if slot.narrow is None else slot.parameter.grad.narrow(*slot.narrow)
        assert gradient.isfinite().all()
        if kept[name] is not None:
            assert not gradient.flatten()[~kept[name]].any(), name
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def _reachable(slot: Any, method: Method) -> Tensor | None:
    """Of the flat weight: what a mask of single elements lets through; None without such a mask."""
    kept = slot.elements_kept
    if slot.subspace is not None and method.importance == "direct":
        kept = top_indices(slot.value.abs().flatten(), method.sparsity_at(0))
    return None if kept is None else torch.zeros(slot.value.numel(), dtype=torch.bool).index_fill(0, kept, True)


@settings(DETERMINISTIC, max_examples=20)
@given(blueprints(), methods())
def test_a_batch_of_no_samples_outside_the_loader_is_refused_and_its_step_is_noise_alone(
    plan: Blueprint, method: Method
) -> None:
    model = plan.build(torch.float32)
    engine, optimizer, _ = attach(model, method, noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.raises(PrivacyError, match="without samples"):
        mean_loss(model, plan.samples(0, torch.float32))
    optimizer.step()
    assert len(engine.accountant) == 1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
