"""Recorded forwards against plain ones, on a CPU: a tape that computes anew in place stands in for CUDA graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, LSG, NonPrivate, PerfConfig, PrivacyEngine, PrivacyError, Ramp, SparseDPSGD
from lsg.methods import Method
from lsg.parameters.outer import OuterProducts
from lsg.parameters.refresh import Refresh
from lsg.parameters.slot import Layout, Slot
from lsg.parameters.stack import make_stacks
from lsg.speed.graphs import GraphedForward
from tests.support.factored import factored
from tests.support.reference import attach, batch_of_one_gradients
from tests.support.tapes import AgainTape, BrokenTape, KernelTape, StillTape, use_tape


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    """Replays alone: none of them is compared with a plain run (that is tests/speed/test_findings.py)."""
    return lambda kind: use_tape(monkeypatch, kind, compares=False)


@pytest.fixture(params=[False, True], ids=["products", "factors"], autouse=True)
def factors(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Everything here twice: dense weights leave products, or the factors of them."""
    with factored(request.param):
        yield request.param


def make(method: Method, perf: PerfConfig) -> tuple[PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    engine = PrivacyEngine()
    data = TensorDataset(torch.randn(64, 12), torch.randint(0, 3, (64,)))
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=32, generator=torch.Generator().manual_seed(1)),
        noise_multiplier=0.0 if isinstance(method, NonPrivate) else 1.0,
        max_grad_norm=1.0,
        method=method,
        max_physical_batch_size=8,
        noise_generator=torch.Generator().manual_seed(2),
        perf=perf,
    )


def train(method: Method, perf: PerfConfig) -> Tensor:
    _, model, optimizer, loader = make(method, perf)
    for _ in range(3):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "method", [DPSGD(), SparseDPSGD(sparsity=0.5), LSG(rank=2, sparsity=0.5), NonPrivate()], ids=str
)
@pytest.mark.parametrize("kind", [AgainTape, KernelTape])
def test_recorded_training_equals_plain_training(method: Method, kind: type, tape: Callable[[type], None]) -> None:
    wanted = train(method, PerfConfig())
    tape(kind)
    found = train(method, PerfConfig(cuda_graphs=True))
    assert AgainTape.replays > 10
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_outputs_of_an_earlier_micro_batch_are_not_written_over(tape: Callable[[type], None]) -> None:
    tape(AgainTape)
    _, model, optimizer, _ = make(DPSGD(), PerfConfig(cuda_graphs=True))
    kept = []
    for _ in range(4):
        out = model(torch.randn(8, 12))
        kept.append((out, out.detach().clone()))
        out.sum().backward()
        optimizer.step()
    assert AgainTape.replays
    for out, copy in kept:
        assert torch.equal(out, copy)


def test_a_recording_has_carriers_that_no_loss_still_held_knows(
    tape: Callable[[type], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd adds up a leaf's gradients on the stream of its first use; a recording may touch its own stream only."""
    tape(AgainTape)
    _, model, optimizer, _ = make(DPSGD(), PerfConfig(cuda_graphs=True))
    recorder = optimizer.gradients.recorder
    wanted: list[Tensor] = []
    grad = torch.autograd.grad

    def watched(outputs: Any, inputs: list[Tensor], *args: Any, **options: Any) -> Any:
        wanted.extend(inputs)
        return grad(outputs, inputs, *args, **options)

    held = [model(torch.randn(8, 12)).square().sum()]
    monkeypatch.setattr(torch.autograd, "grad", watched)
    for _ in range(2):
        held[-1].backward()
        optimizer.step()
        used = [id(carrier) for slot in recorder.slots.values() for carrier in slot.carriers]
        held.append(model(torch.randn(8, 12)).square().sum())
        assert wanted and not {id(leaf) for leaf in wanted} & set(used)


def test_a_forward_before_the_last_ones_backward_does_not_disturb_it(tape: Callable[[type], None]) -> None:
    tape(AgainTape)
    engine, model, optimizer, _ = make(DPSGD(), PerfConfig(cuda_graphs=True))
    x, other = torch.randn(8, 12), torch.randn(8, 12)
    for _ in range(3):  # seen, recorded, replayed
        model(x).square().sum().backward()
        wanted = engine.per_sample_gradients()["0.weight"].clone()  # type: ignore[union-attr]
        optimizer.zero_grad()
    first = model(x).square().sum()
    second = model(other).square().sum()
    first.backward()
    torch.testing.assert_close(engine.per_sample_gradients()["0.weight"], wanted)
    optimizer.zero_grad()
    del second
    model(x).square().sum().backward()
    model(x).square().sum().backward()  # adds up, in memory of its own
    torch.testing.assert_close(engine.per_sample_gradients()["0.weight"], 2 * wanted)


class Summed(nn.Module):
    """Two parameters that autograd hands one and the same gradient; running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(3, 12)) for _ in range(2))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Any:
        return self.norm(F.linear(x, self.a + self.b))


def test_recorded_gradients_are_apart_and_statistics_count_each_batch_once(tape: Callable[[type], None]) -> None:
    tape(AgainTape)
    model = Summed()
    data = DataLoader(TensorDataset(torch.randn(64, 12)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=data,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        method=NonPrivate(),
        perf=PerfConfig(cuda_graphs=True),
    )
    for _ in range(3):  # seen, recorded, replayed
        model.zero_grad()
        model(torch.randn(8, 12)).square().sum().backward()
    assert model.a.grad is not None and model.b.grad is not None
    before = model.b.grad.clone()
    model.a.grad.mul_(5)
    assert torch.equal(model.b.grad, before)
    assert model.norm.num_batches_tracked is not None and int(model.norm.num_batches_tracked) == 3


def test_a_second_backward_is_refused(tape: Callable[[type], None]) -> None:
    tape(AgainTape)
    _, model, optimizer, _ = make(DPSGD(), PerfConfig(cuda_graphs=True))
    for _ in range(3):
        loss = model(torch.ones(8, 12)).sum()
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
    with pytest.raises(PrivacyError, match="twice"):
        loss.backward()


def test_each_replay_leaves_the_factors_of_its_own_batch(tape: Callable[[type], None], factors: bool) -> None:
    """Without biases no carrier gets a gradient: factors are all there is."""
    tape(AgainTape)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
    engine, optimizer, _ = attach(model, DPSGD(), perf=PerfConfig(cuda_graphs=True))
    slot = engine._recorder.slots["2.weight"]
    for i in range(4):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i))
        model(x).square().sum(1).mean().backward()
        assert isinstance(slot.parts()[0], OuterProducts) == factors
        found = engine.per_sample_gradients()
        wanted = batch_of_one_gradients(model, x, 8, lambda m, x: m(x).square().sum(1).mean())
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient)
        optimizer.zero_grad()
    assert AgainTape.replays


def test_a_replay_of_an_earlier_batch_does_not_reach_the_next_one(tape: Callable[[type], None]) -> None:
    tape(StillTape)
    engine, model, optimizer, _ = make(DPSGD(), PerfConfig(cuda_graphs=True))
    for _ in range(2):
        model(torch.ones(8, 12)).sum().backward()
        assert optimizer.gradients.pending()
        optimizer.zero_grad()
    late = model(torch.ones(8, 12)).sum()
    engine._recorder.renew()  # type: ignore[union-attr]
    late.backward()
    assert AgainTape.replays == 4 and not optimizer.gradients.pending()


def test_a_model_that_cannot_be_recorded_trains_as_usual(tape: Callable[[type], None]) -> None:
    wanted = train(DPSGD(), PerfConfig())
    tape(BrokenTape)
    with pytest.warns(UserWarning, match="cannot be recorded"):
        found = train(DPSGD(), PerfConfig(cuda_graphs=True))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


class Positions(nn.Module):
    """Makes a tensor on the fly without saying where, as MPNet's position buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)
        self.made_on: list[torch.device] = []

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        self.made_on.append(places.device)
        return self.layer(x) + places.sum().to(x.device)


def test_tensors_made_on_the_fly_are_made_where_the_model_is(tape: Callable[[type], None]) -> None:
    tape(AgainTape)
    model = Positions().to("meta")
    slots = [Slot(name, parameter, None) for name, parameter in model.named_parameters()]
    GraphedForward(model.forward, model, slots, AgainTape())(torch.zeros(8, 12, device="meta"))
    assert model.made_on == [torch.device("meta")]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor, by: Any) -> Tensor:
        return self.layer(x) * getattr(by, "scale", by)


def test_only_inputs_that_cannot_change_unseen_are_recorded(tape: Callable[[type], None]) -> None:
    """A graph would go on reading what an object held when it was recorded: another batch's data."""
    tape(AgainTape)
    model, holder = Scaled(), nn.Identity()
    slots = [Slot(name, parameter, None) for name, parameter in model.named_parameters()]
    for slot in slots:
        slot.prepare(8)
    forward = GraphedForward(lambda x, by: model(x, by) + slots[1].carriers[0], model, slots, AgainTape())
    x = torch.randn(8, 12)
    for scale in (1.0, 2.0, 3.0):
        holder.scale = torch.full((8, 1), scale)  # type: ignore[assignment]
        forward(x, holder)
    assert not forward.recorded and not AgainTape.replays
    for by in (1, 1, True, True):  # equal to each other, and hash the same
        forward(x, by)
    assert forward.recorded == 2


class FakeGraph:
    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


def test_a_recorded_refresh_does_not_read_where_weights_no_longer_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(self: Refresh, sparsity: float) -> None:
        self._run(sparsity)
        self._graph = FakeGraph()  # type: ignore[assignment]

    monkeypatch.setattr(Refresh, "_record", record)
    monkeypatch.setattr(FakeGraph, "replays", 0)
    parameter = nn.Parameter(torch.randn(20, 20))
    slots = [Slot("weight", parameter, Layout(transposed=True))]
    refresh = Refresh(make_stacks(slots), slots, LSG(rank=2), torch.Generator().manual_seed(0), cuda_graph=True)
    assert [refresh(step) for step in range(3)] == [True, False, False] and FakeGraph.replays == 2
    old = parameter.data
    parameter.data = old.clone()
    assert refresh(3) and FakeGraph.replays == 2  # recorded anew
    assert not refresh(4) and FakeGraph.replays == 3
    del old


def test_a_refresh_is_not_recorded_where_no_step_is_like_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    def record(self: Refresh, sparsity: float) -> None:
        recorded.append(sparsity)
        self._run(sparsity)
        self._graph = FakeGraph()  # type: ignore[assignment]

    monkeypatch.setattr(Refresh, "_record", record)
    slots = [Slot("weight", nn.Parameter(torch.randn(20, 20)), Layout(transposed=True))]
    method = LSG(rank=2, sparsity=0.5, schedule=Ramp(0, 5))
    refresh = Refresh(make_stacks(slots), slots, method, torch.Generator().manual_seed(0), cuda_graph=True)
    moved = [refresh(step) for step in range(9)]
    assert recorded == [0.0, 0.5]  # the first, and when the ramp is over
    assert moved == [True] * 7 + [False] * 2


def test_what_is_discarded_over_and_over_is_no_longer_recorded(tape: Callable[[type], None]) -> None:
    """A schedule that moves subspaces at each step: recordings would cost more than they save."""
    tape(AgainTape)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))
    slots = [Slot(name, parameter, None) for name, parameter in model.named_parameters()]
    for slot in slots:
        slot.prepare(8)
    forward = GraphedForward(lambda x: model(x) + slots[3].carriers[0], model, slots, AgainTape())
    for _ in range(10):
        for _ in range(4):
            forward(torch.randn(8, 12))
        forward.discard_recordings()
    assert forward.recorded == 4
