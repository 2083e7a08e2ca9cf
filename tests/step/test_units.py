"""Units: rows of one record, or records of one id, are averaged before the clip; sampling and ε are about units."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, LSG, RGP, ConfigurationError, NonPrivate, PerfConfig, PrivacyEngine, SparseDPSGD
from lsg.accounting import create_accountant
from lsg.methods import Method
from lsg.step.unit_average import average_units
from tests.support.factored import factored
from tests.support.reference import batch_of_one_gradients, project

METHODS = [LSG(rank=2, sparsity=0.4), RGP(rank=2), SparseDPSGD(sparsity=0.5), DPSGD()]
CLIPPINGS = ["flat", "per_layer", "automatic"]
RECORDS, WIDTH = 24, 6
IDS = [0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5, 6, 7, 7, 7, 8, 9, 9, 10, 11, 11, 12, 12, 12]  # 13 units of 1 to 3 records


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def records(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, WIDTH, generator=generator, dtype=dtype)
    return TensorDataset(x * 3, torch.randint(0, 5, (RECORDS,), generator=generator), torch.arange(RECORDS))


def private(model: nn.Module, method: Method, *, batch_size: int = 6, data: Any = None, **options: Any) -> Any:
    """Engine, optimizer and loader, by default without noise and with all randomness from seeds."""
    engine = PrivacyEngine(accountant="rdp")
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "noise_generator": torch.Generator().manual_seed(3)}
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data or records(), batch_size=batch_size, generator=torch.Generator().manual_seed(4)),
        method=method,
        **settings | options,
    )
    return engine, optimizer, loader


def views_of(x: Tensor, views: int) -> Tensor:
    """Each record `views` times, adjacent, each time a little different."""
    return torch.stack([x * (1 + 0.3 * view) for view in range(views)], dim=1).flatten(0, 1)


def loss(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(x), y, reduction=reduction)


def reference(
    engine: Any, model: nn.Module, x: Tensor, y: Tensor, unit_rows: list[int], clipping: str, c: float
) -> list[Tensor]:
    """The clipped sum by batches of one row: their gradients, averaged for each unit, projected, clipped and summed.
    For each slot in order, at full size."""
    rows = batch_of_one_gradients(model, (x, y), len(x), lambda m, batch: loss(m, *batch))
    slots, blocks = engine._recorder.in_order, []
    for slot in slots:
        mean = torch.stack([part.mean(0) for part in rows[slot.name].split(unit_rows)])
        if slot.subspace is not None:
            blocks.append(torch.cat([part.flatten(1) for part in project(mean, slot.subspace)], dim=1))
        elif slot.elements_kept is None:
            blocks.append(mean.flatten(1))
        else:
            blocks.append(mean.flatten(1) * torch.zeros(mean[0].numel()).index_fill(0, slot.elements_kept, 1.0))
    norms = torch.stack([block.norm(dim=1) for block in blocks], dim=1)
    joint = norms.norm(dim=1, keepdim=True)
    factors = {
        "flat": (c / joint).clamp(max=1).expand_as(norms),
        "automatic": (c / (joint + 0.01)).expand_as(norms),
        "per_layer": (c / math.sqrt(len(slots)) / norms).clamp(max=1),
    }[clipping]
    return [(factor[:, None] * block).sum(0) for factor, block in zip(factors.T, blocks, strict=True)]


def at_full_size(engine: Any, vector: Tensor) -> list[Tensor]:
    """A clipped sum, as `reference` returns it."""
    slots, found = engine._recorder.in_order, []
    for slot, part in zip(slots, vector.split([slot.dimensions for slot in slots]), strict=True):
        if slot.subspace is None:
            found.append(slot.spread(part).flatten())
        else:
            shapes = [shape[1:] for shape in slot.shapes(1)]
            pair = part.split([math.prod(shape) for shape in shapes])
            factors = slot.subspace.unpack(*(t.view(shape) for t, shape in zip(pair, shapes, strict=True)))
            found.append(torch.cat([factor.flatten() for factor in factors]))
    return found


@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_clipped_sum_is_that_of_averaged_batches_of_one(
    method: Method, clipping: str, reduction: str, factors: bool
) -> None:
    """Units of one size (as views are) and of several (as persons are)."""
    x, y, _ = records()[:7]
    for unit_rows in ([2, 2, 2], [3, 1, 2, 1]):
        rows = sum(unit_rows)
        model = network()
        plain = copy.deepcopy(model)
        engine, optimizer, _ = private(model, method, clipping=clipping, loss_reduction=reduction, max_grad_norm=0.5)
        clock = optimizer.clock
        clock.begin_micro_batch(clock.enter_epoch(), size=rows, last=True, unit_rows=tuple(unit_rows))
        with factored(factors):
            loss(model, x[:rows], y[:rows], reduction).backward()
        optimizer.gradients.collect(rows, unit_rows)
        found = optimizer.gradients.sum
        assert found.bound == pytest.approx(0.5)
        wanted = reference(engine, plain, x[:rows], y[:rows], unit_rows, clipping, 0.5)
        for one, other in zip(at_full_size(engine, found.vector), wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-8, atol=1e-12)
        assert (found.vector.norm() > 0.1) and sum(map(len, wanted)) > 100
        engine.detach()


@pytest.mark.parametrize("unit_rows", [[2, 2, 2], [1, 3, 2], [1, 1, 4], [6]])
def test_a_broken_row_makes_its_unit_zero_and_no_other(unit_rows: list[int]) -> None:
    part = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    broken = part.clone()
    broken[0, 4] = math.nan
    found = average_units(broken, unit_rows)
    wanted = torch.stack([rows.mean(0) for rows in part.split(unit_rows)])
    assert isinstance(found, Tensor) and not found[0].isfinite().all()
    assert torch.allclose(found[1:], wanted[1:])


def test_a_broken_row_counts_as_zero_in_a_step() -> None:
    sums = []
    for take in ([0, 1, 2, 3], [2, 3]):
        model = network()
        _, optimizer, _ = private(model, DPSGD(), views=2, loss_reduction="sum")
        x, y, _ = records()[:4]
        x[1, 0] = math.inf
        loss(model, x[take], y[take], "sum").backward()
        optimizer.gradients.collect(None)
        sums.append(optimizer.gradients.sum.vector)
    assert torch.allclose(*sums) and sums[0].norm() > 0


def run(model: nn.Module, optimizer: Any, loader: Any, views: int = 1) -> list[list[int]]:
    """One epoch, or what is left of it; the numbers of the records in each batch."""
    seen = []
    for x, y, number in loader:
        loss(model, views_of(x, views), y.repeat_interleave(views)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(number.tolist())
    return seen


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_views_that_are_all_the_same_change_nothing(reduction: str) -> None:
    ends = []
    for views in (1, 3):
        model = network()
        _, optimizer, loader = private(model, LSG(rank=2), views=views, loss_reduction=reduction, noise_multiplier=1.0)
        for x, y, _ in loader:
            loss(model, x.repeat_interleave(views, 0), y.repeat_interleave(views), reduction).backward()
            optimizer.step()
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.allclose(*ends, rtol=1e-9)


def test_the_same_views_change_nothing_in_non_private_training() -> None:
    ends = []
    for views in (1, 3):
        model = network()
        _, optimizer, loader = private(model, NonPrivate(), views=views)
        for x, y, _ in loader:
            loss(model, x.repeat_interleave(views, 0), y.repeat_interleave(views)).backward()
            optimizer.step()
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.allclose(*ends, rtol=1e-9)


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array, lambda ids: [f"person {i}" for i in ids]])
def test_units_are_drawn_whole_adjacent_and_in_one_micro_batch(kind: Any) -> None:
    model = network()
    engine, optimizer, loader = private(model, DPSGD(), unit_of=kind(IDS), max_physical_batch_size=5)
    assert loader.sample_rate == pytest.approx(6 / 13) and optimizer.expected_batch_size == 6
    for _ in range(5):
        for numbers in run(model, optimizer, loader):
            assert len(numbers) <= 5
            units = [IDS[i] for i in numbers]
            assert sorted(units, key=units.index) == units  # adjacent
            for unit in set(units):
                assert units.count(unit) == IDS.count(unit)  # whole
    assert {rate for _, rate, _ in engine.accountant.history} == {6 / 13}


def test_each_unit_enters_a_step_at_the_rate_of_the_plan() -> None:
    """Counts of 13 units in 2000 steps: each within 5 standard deviations, which fails by chance once in 130 000 seeds;
    the seed is fixed. Sizes of units do not matter."""
    _, _, loader = private(network(), DPSGD(), unit_of=IDS, batch_size=3)
    counts, steps = torch.zeros(13), 0
    while steps < 2000:
        for logical in loader.logical.draw_epoch(0):
            steps += 1
            counts[sorted({IDS[record] for micro in logical for record in micro})] += 1
    rate = 3 / 13
    deviation = math.sqrt(steps * rate * (1 - rate))
    assert ((counts - steps * rate).abs() < 5 * deviation).all()


def test_at_most_so_many_records_of_a_unit_enter_chosen_anew_at_each_step() -> None:
    """The 3 pairs of a unit of 3 are chosen alike: within 5 standard deviations, but for once in 580 000 seeds."""
    _, _, loader = private(network(), DPSGD(), unit_of=IDS, batch_size=13, max_records_per_unit=2)
    pairs: dict[tuple[int, ...], int] = {}
    for _ in range(900):
        (logical,) = loader.logical.draw_epoch(0)
        drawn = [record for micro in logical for record in micro]
        assert len(drawn) == sum(min(2, IDS.count(unit)) for unit in set(IDS))
        pair = tuple(record for record in drawn if IDS[record] == 2)
        pairs[pair] = pairs.get(pair, 0) + 1
    assert set(pairs) == {(3, 4), (3, 5), (4, 5)}
    assert all(abs(count - 300) < 5 * math.sqrt(900 * 2 / 9) for count in pairs.values())


def test_epsilon_is_about_units() -> None:
    model = network()
    engine, optimizer, loader = private(model, DPSGD(), unit_of=IDS, batch_size=2, noise_multiplier=1.5)
    run(model, optimizer, loader)
    by_hand = create_accountant("rdp")
    for _ in range(round(13 / 2)):
        by_hand.step(noise_multiplier=1.5, sample_rate=2 / 13)
    assert engine.get_epsilon(1e-3) == by_hand.get_epsilon(1e-3)
    with pytest.warns(UserWarning, match="1/N"):
        engine.get_epsilon(1 / 13)
    assert engine.get_epsilon(1 / 14) > 0


def test_the_target_is_calibrated_for_units() -> None:
    model, engine = network(), PrivacyEngine(accountant="rdp")
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=2),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        unit_of=IDS,
        views=2,
        max_records_per_unit=2,
    )
    for _ in range(2):
        run(model, optimizer, loader, views=2)
    assert len(engine.accountant) == round(2 * 13 / 2) and 2.9 < engine.get_epsilon(1e-3) <= 3.0


@pytest.mark.parametrize("options", [{"views": 2}, {"unit_of": IDS, "max_records_per_unit": 2}, {"unit_of": IDS}])
def test_a_continued_run_is_the_same_to_the_bit(options: dict[str, Any]) -> None:
    views = options.get("views", 1)
    settings = options | {"max_physical_batch_size": 4, "noise_multiplier": 1.0}

    def fresh() -> Any:
        model = network(torch.float32)
        return model, *private(model, LSG(rank=2), data=records(torch.float32), **settings)

    model, _, optimizer, loader = fresh()
    whole = run(model, optimizer, loader, views) + run(model, optimizer, loader, views)
    wanted = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert len(whole) > 6
    model, engine, optimizer, loader = fresh()
    seen = []
    for x, y, number in loader:
        loss(model, views_of(x, views), y.repeat_interleave(views)).backward()
        optimizer.step()
        seen.append(number.tolist())
        if len(seen) == 3:
            state, weights = engine.state_dict(), copy.deepcopy(model.state_dict())
            break
    continued, again, optimizer, loader = fresh()
    continued.load_state_dict(weights)
    again.load_state_dict(state)
    while len(seen) < len(whole):
        seen += run(continued, optimizer, loader, views)
    assert seen == whole
    assert torch.equal(nn.utils.parameters_to_vector(continued.parameters()), wanted)


def test_a_state_of_other_units_is_refused_and_one_without_units_knows_nothing_of_them() -> None:
    plain = private(network(), DPSGD())[0].state_dict()
    assert not {"views", "unit_of", "max_records_per_unit"} & set(plain["plan"])
    viewed = private(network(), DPSGD(), views=2)[0]
    with pytest.raises(ConfigurationError, match=r"views=None, but this engine was made with views=2"):
        viewed.load_state_dict(plain)
    with pytest.raises(ConfigurationError, match=r"views=2, but this engine was made with views=None"):
        private(network(), DPSGD())[0].load_state_dict(viewed.state_dict())
    state = private(network(), DPSGD(), unit_of=IDS)[0].state_dict()
    assert (
        all(str(name) not in state["plan"]["unit_of"] for name in ("person",)) and len(state["plan"]["unit_of"]) == 64
    )
    renamed = [f"person {i}" for i in IDS]
    private(network(), DPSGD(), unit_of=renamed)[0].load_state_dict(state)  # the same units
    with pytest.raises(ConfigurationError, match="unit_of="):
        private(network(), DPSGD(), unit_of=[*IDS[:-1], 0])[0].load_state_dict(state)
    with pytest.raises(ConfigurationError, match=r"max_records_per_unit=None, but .* max_records_per_unit=2"):
        private(network(), DPSGD(), unit_of=IDS, max_records_per_unit=2)[0].load_state_dict(state)
    with pytest.raises(ConfigurationError, match=r"records=13, but this engine was made with records=24"):
        private(network(), DPSGD())[0].load_state_dict(state)


def test_tokens_and_lengths_keep_units_whole() -> None:
    data = records()
    data.lengths = [1 + i % 7 for i in range(RECORDS)]  # type: ignore[attr-defined]
    for perf in (PerfConfig(), PerfConfig(max_tokens=20)):
        model = network()
        _, optimizer, loader = private(model, DPSGD(), data=data, unit_of=IDS, views=2, perf=perf)
        for numbers in run(model, optimizer, loader, views=2):
            units = [IDS[i] for i in numbers]
            assert all(units.count(unit) == IDS.count(unit) for unit in units)
            tokens = 2 * len(numbers) * max(data.lengths[i] for i in numbers)  # type: ignore[attr-defined]
            assert perf.max_tokens is None or tokens <= 20 or len(set(units)) == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # PyTorch's own compiler warns of itself
def test_padding_adds_no_row_to_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: compiled(*a, **k | {"backend": "aot_eager"}))
    ends = []
    for perf in (PerfConfig(), PerfConfig(compile=True, pad=True)):
        model = network()
        options: dict[str, Any] = {"unit_of": IDS, "max_physical_batch_size": 8, "perf": perf}
        _, optimizer, loader = private(model, DPSGD(), **options)
        run(model, optimizer, loader)
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.allclose(*ends, rtol=1e-9)
