"""The privacy rules of the design, each with a test that fails when the rule is broken."""

import math
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg import DPSGD, LSG, RGP, ConfigurationError, PerfConfig, PrivacyError, SparseDPSGD
from lsg.methods import Method
from lsg.step.noise import add_noise
from tests.support.factored import factored
from tests.support.reference import assert_per_sample_gradients, attach

METHODS = [LSG(rank=2, sparsity=0.4), RGP(rank=2), SparseDPSGD(sparsity=0.5), DPSGD()]
CLIPPINGS = ["flat", "per_layer", "automatic"]
C = 0.8


class Tied(nn.Module):
    """An embedding, a convolution, norms, a weight used twice, and a head tied to the embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, token: Tensor) -> Tensor:
        x = self.embed(token)
        x = self.norm(x + self.conv(x.mT).mT.tanh())
        return self.head(x + self.mix(self.mix(x).tanh())).mean(1)


def clipped_sum(
    model: nn.Module,
    method: Method,
    clipping: str,
    token: Tensor,
    label: Tensor,
    scale: Tensor,
    unit_rows: tuple[int, ...] | None = None,
) -> Tensor:
    """The clipped sum of a batch whose samples' losses are scaled one by one. unit_rows: rows of each unit."""
    generator = torch.Generator().manual_seed(9)
    engine, optimizer, _ = attach(model, method, max_grad_norm=C, clipping=clipping, noise_generator=generator)
    (F.cross_entropy(model(token), label, reduction="none") * scale).mean().backward()
    optimizer.gradients.collect(None, unit_rows)
    vector: Tensor = optimizer.gradients.sum.vector
    assert optimizer.gradients.sum.bound == pytest.approx(C)
    engine.detach()
    return vector


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_removing_a_sample_changes_the_sum_by_at_most_the_bound(method: Method, clipping: str) -> None:
    """Rules 1, 2 and 9, over random networks and samples whose gradients are scaled up to 1e6."""
    largest = 0.0
    for seed in range(6):
        torch.manual_seed(seed)
        model = Tied(8 + 2 * (seed % 3)).double()
        if seed % 2:  # an adversary's layer: gradients a million times larger in one place
            with torch.no_grad():
                [model.embed, model.conv, model.mix][seed // 2].weight.mul_(1e6 if seed == 3 else 1e3)
        token, label = torch.randint(0, 20, (5, 6)), torch.randint(0, 20, (5,))
        scale = torch.tensor([1e6, 1.0, 1e-6, 1e3, 0.1], dtype=torch.float64)
        whole = clipped_sum(model, method, clipping, token, label, scale)
        for gone in range(5):
            rest = [i for i in range(5) if i != gone]
            without = clipped_sum(model, method, clipping, token[rest], label[rest], scale[rest])
            largest = max(largest, float((whole - without).norm()))
    assert largest <= C * (1 + 1e-6)
    assert largest >= 0.5 * C  # the bound is not met by making gradients vanish


@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_removing_a_unit_changes_the_sum_by_at_most_the_bound(method: Method, clipping: str, factors: bool) -> None:
    """Rule 1 for units of several rows (records of one id, or views of a record): as many, and different numbers."""
    largest = 0.0
    for seed, sizes in enumerate([(2, 2, 2), (3, 1, 2), (1, 4, 1)]):
        torch.manual_seed(seed)
        model = Tied(8).double()
        token, label = torch.randint(0, 20, (6, 6)), torch.randint(0, 20, (6,))
        token[:], label[:] = token[:1], label[:1]  # rows that all pull the same way
        scale = torch.tensor([1e6, 1e3, 1e3, 1.0, 1e3, 1e3], dtype=torch.float64)
        rows = torch.arange(6).split(sizes)

        def total(
            units: list[int], model: nn.Module = model, rows: Any = rows, batch: Any = (token, label, scale)
        ) -> Any:
            kept = torch.cat([rows[unit] for unit in units])
            unit_rows = tuple(len(rows[unit]) for unit in units)
            with factored(factors):
                return clipped_sum(model, method, clipping, *(t[kept] for t in batch), unit_rows=unit_rows)

        whole = total([0, 1, 2])
        for gone in range(3):
            without = total([unit for unit in range(3) if unit != gone])
            largest = max(largest, float((whole - without).norm()))
    assert largest <= C * (1 + 1e-6)
    assert largest >= 0.5 * C


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_noise_has_the_right_variance_and_only_on_kept_entries(
    method: Method, clipping: str, noisy_sums: list[Tensor]
) -> None:
    """Rule 3. The sample variance of n normal numbers is within 5 * sqrt(2/n) of 1 but for 1 run in 1.7 million."""
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30))
    sigma, squares, count = 1.7, 0.0, 0
    engine, optimizer, _ = attach(
        model,
        method,
        max_grad_norm=C,
        clipping=clipping,
        noise_multiplier=sigma,
        noise_generator=torch.Generator().manual_seed(1),
        loss_reduction="sum",
    )
    for _ in range(20):
        (model(torch.zeros(3, 40)) * 0).sum().backward()
        optimizer.step()
    for vector in noisy_sums:
        squares, count = squares + float(vector.square().sum()), count + vector.numel()
    ratio = squares / count / (sigma * C) ** 2
    assert abs(ratio - 1) < 5 * math.sqrt(2 / count)
    assert count == 20 * sum(slot.dimensions for slot in engine._recorder.slots.values())


@pytest.fixture
def noisy_sums(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every noisy sum that is released."""
    captured: list[Tensor] = []

    def spy(*args: Any) -> Any:
        noisy = add_noise(*args)
        captured.append(noisy.vector)
        return noisy

    monkeypatch.setattr("lsg.step.gradients.add_noise", spy)
    return captured


def test_masked_entries_get_no_noise_at_all() -> None:
    """Rows and columns of a lifted update that only masked entries could reach are exactly zero."""
    model = nn.Linear(40, 60, bias=False)
    engine, optimizer, _ = attach(model, LSG(rank=2, sparsity=0.5), noise_multiplier=1.0, max_grad_norm=1.0)
    space = engine.subspaces["weight"]
    slot = engine._recorder.slots["weight"]
    model(torch.randn(3, 40)).sum().backward()
    d_left, d_right = engine.per_sample_gradients()["weight"]
    assert not d_left[:, ~space.left_mask].any() and not d_right[:, :, ~space.right_mask].any()
    vector = torch.randn(slot.dimensions)
    rows, columns = vector.split([2 * 30, 2 * 20])
    noisy_left, noisy_right = space.unpack(rows.view(2, 30), columns.view(2, 20))
    assert torch.count_nonzero(noisy_left[~space.left_mask]) == 0
    assert torch.count_nonzero(noisy_right[:, ~space.right_mask]) == 0
    sparse = nn.Linear(40, 60, bias=False)
    engine, optimizer, _ = attach(sparse, SparseDPSGD(sparsity=0.5), noise_multiplier=1.0, max_grad_norm=1.0)
    sparse(torch.randn(3, 40)).sum().backward()
    masked = sparse.weight.detach().abs().flatten().argsort()[: 40 * 30]
    optimizer.step()
    assert torch.count_nonzero(sparse.weight.grad.flatten()[masked]) == 0
    assert torch.count_nonzero(sparse.weight.grad) == 40 * 30


def test_noise_is_drawn_once_per_logical_step_and_unused_parameters_get_it_too(noisy_sums: list[Tensor]) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Lazy()
    _, optimizer, _ = attach(model, DPSGD(), noise_multiplier=1.0, max_grad_norm=1.0)
    epoch = optimizer.clock.enter_epoch()
    optimizer.clock.begin_micro_batch(epoch, size=2, last=False)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert not optimizer.stepped and not noisy_sums
    optimizer.clock.begin_micro_batch(epoch, size=3, last=True)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert optimizer.stepped and len(noisy_sums) == 1
    assert torch.count_nonzero(model.unused.weight.grad) == 16


def test_the_divisor_is_the_expected_batch_size_whatever_the_batch() -> None:
    """Rule 4."""
    for actual in (1, 3, 9):
        model = nn.Linear(4, 1, bias=False)
        _, optimizer, _ = attach(model, DPSGD(), batch_size=8)
        x = torch.ones(actual, 4)
        model(x).mean().backward()
        optimizer.step()
        assert torch.allclose(model.weight.grad, torch.full((1, 4), actual / 8))


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_sample_counts_as_zero_and_poisons_nothing(value: float, clipping: str) -> None:
    """Rule 6."""

    def step(x: Tensor) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))
        generator = torch.Generator().manual_seed(2)
        engine, optimizer, _ = attach(
            model, LSG(rank=1, sparsity=0.3), max_grad_norm=C, clipping=clipping, noise_generator=generator
        )
        (model(x).sum() / 4).backward()  # divided by the size of the whole batch, to compare
        recorder = engine._recorder
        optimizer.gradients.sum = optimizer.gradients.clipper.clip(recorder.per_sample(), 4.0)
        recorder.clear()
        optimizer.step()
        return torch.cat([p.grad.flatten() for p in model.parameters()]), len(engine.accountant)

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    broken = x.clone()
    broken[2, 3] = value
    gradient, steps = step(broken)
    wanted, _ = step(x[[0, 1, 3]])
    assert steps == 1
    assert torch.isfinite(gradient).all()
    assert torch.allclose(gradient, wanted, atol=1e-7)


def test_a_weight_used_outside_its_module_is_refused() -> None:
    """Rule 8: nothing is trained without clipping and noise."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.layer(x), self.layer.weight)

    model = Functional()  # the model itself, which contains the layer, runs sample by sample: its use is covered
    x = torch.randn(3, 6, dtype=torch.float64)
    assert_per_sample_gradients(model.double(), LSG(rank=1, sparsity=0.0), x, 3, lambda m, x: m(x).square().mean())
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match=r"layer\.weight"):  # in the loss, outside of every module
        (model(x).sum() + model.layer.weight.norm()).backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # PyTorch's own compiler warns of itself
@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_used_outside_its_module_is_refused_beside_the_last_steps_gradient(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 8: what the last step left in `.grad` does not hide what is added to it."""

    class SometimesFunctional(nn.Module):
        escapes: ClassVar[list[bool]] = []  # nothing that lsg looks at

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.layer(x), self.layer.weight) if self.escapes else self.layer(x)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = SometimesFunctional()
    _, optimizer, _ = attach(model, DPSGD(), perf=PerfConfig(compile=compiled))
    for _ in range(2):
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
    assert model.layer.weight.grad is not None
    model.escapes.append(True)
    with pytest.raises(PrivacyError, match=r"layer\.weight"):
        model(torch.randn(3, 6)).sum().backward()
    assert model.layer.weight.grad is None


def test_parameters_outside_the_plan_are_not_trained() -> None:
    """Rule 8: unfreezing after make_private does not smuggle in a raw gradient, and is not passed over in silence."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    engine, optimizer, _ = attach(model, DPSGD())
    before = model[0].weight.detach().clone()
    loss = model(torch.randn(3, 6)).sum()
    model[0].requires_grad_(True)
    loss.backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    with pytest.raises(ConfigurationError, match=r"'0\.weight' was unfrozen after make_private"):
        model(torch.randn(3, 6))
    engine.detach()
    attach(model, DPSGD())
    model(torch.randn(3, 6))


class MixesSamples(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(6, 12), nn.Linear(12, 6), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "mean":
            x = x - x.mean(0)
        elif self.how == "roll":
            x = x.roll(1, 0)
        elif self.how == "swap":  # neighbours within one half of the batch
            x = x[[1, 0, 2, 3]]
        elif self.how == "time_first":
            x = self.second(x.transpose(0, 1).reshape(-1, 12)).view(x.shape[1], x.shape[0], 6)
            return x.transpose(0, 1)
        return self.second(x)


def test_samples_that_are_not_batch_first_inside_a_model_are_found_by_value() -> None:
    model, x = MixesSamples("time_first").double(), torch.randn(4, 3, 6, dtype=torch.float64)
    assert_per_sample_gradients(model, LSG(rank=1, sparsity=0.0), x, 4, lambda m, x: m(x).square().mean())


@pytest.mark.parametrize("how", ["mean", "roll", "swap"])
def test_a_model_that_mixes_samples_is_refused_by_name_at_its_first_batch(how: str) -> None:
    """Rule 7, for what no list of layer types can know."""
    model = MixesSamples(how)
    attach(model, LSG(rank=1, sparsity=0.0))
    with pytest.raises(PrivacyError, match=r"layer 'second'"):
        model(torch.randn(4, 3, 6))


def test_second_derivatives_are_refused() -> None:
    model = nn.Linear(3, 3)
    attach(model, DPSGD())
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(PrivacyError, match="create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_positions_that_happen_to_number_as_many_as_samples_are_not_mistaken_for_samples() -> None:
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.layer = nn.Embedding(9, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.position(torch.arange(x.shape[1])))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    assert_per_sample_gradients(Positioned().double(), DPSGD(), torch.randn(4, 4, 6).double(), 4, loss)
    by_parts = Positioned()
    attach(by_parts, DPSGD())
    with pytest.raises(PrivacyError, match="layer 'position' ran outside of the model's forward"):
        by_parts.position(torch.arange(4))
    other = Positioned()
    _, optimizer, _ = attach(other, DPSGD())
    other(torch.randn(3, 4, 6)).sum().backward()  # learnt here: indices without a batch dimension
    optimizer.step()
    assert other(torch.randn(4, 4, 6)).shape == (4, 4, 6)


def test_independent_models_pass_the_check_with_dropout_and_leave_the_random_state_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 3))
    attach(model, LSG(rank=1, sparsity=0.0))
    torch.manual_seed(0)
    first = model(torch.ones(4, 6))
    torch.manual_seed(0)
    second = model(torch.ones(4, 6))
    assert torch.equal(first, second)


def test_a_list_of_thresholds_goes_by_the_models_order_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 12)).double()
    names = [name for name, _ in model.named_parameters()]
    thresholds = [10.0**-i for i in range(len(names))]
    engine, optimizer, _ = attach(model, LSG(rank=1, sparsity=0.0), max_grad_norm=thresholds, clipping="per_layer")
    (model(torch.randn(1, 6, dtype=torch.float64)) * 1e6).pow(2).sum().backward()
    optimizer.gradients.collect(None)
    total = optimizer.gradients.sum
    assert total.bound == pytest.approx(math.sqrt(sum(c * c for c in thresholds)))
    order = engine._recorder.in_order
    parts = total.vector.split([slot.dimensions for slot in order])
    for slot, part in zip(order, parts, strict=True):
        assert float(part.norm()) == pytest.approx(thresholds[names.index(slot.name)]), slot.name
