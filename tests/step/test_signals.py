"""Signals of a step: what they say against per-sample gradients by hand, and that nothing waits for them."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, LSG, RGP, NonPrivate, PrivacyEngine, SparseDPSGD
from lsg.methods import Method
from lsg.sampling.random_sources import TorchNoise
from lsg.step.clipping import Clipper
from lsg.step.noise import add_noise
from lsg.step.signals import StepSignals, measure
from tests.support.small_run import Training, stop_at

METHODS = [LSG(rank=2, sparsity=0.4), RGP(rank=2), SparseDPSGD(sparsity=0.5), DPSGD()]
RECORDS, WIDTH, C = 24, 6, 0.6


def private(method: Method, *, batch_size: int = 8, **options: Any) -> Any:
    """(engine, model, optimizer, loader), by default without noise and with all randomness from seeds."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, WIDTH, generator=generator)
    data = TensorDataset(x, torch.randint(0, 5, (RECORDS,), generator=generator))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 5))
    engine = PrivacyEngine(accountant="rdp")
    settings = {"noise_multiplier": 0.0, "max_grad_norm": C, "noise_generator": torch.Generator().manual_seed(3)}
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=batch_size, generator=torch.Generator().manual_seed(4)),
        method=method,
        **settings | options,
    )
    return engine, *made


def first_step(parts: Any) -> tuple[StepSignals, Tensor]:
    """Signals of the first logical step, and its per-sample gradients (B, K, numbers), zeros where a slot has fewer."""
    engine, model, optimizer, loader = parts
    rows: list[Tensor] = []
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        slots = [
            torch.cat([part.flatten(1) for part in (found if isinstance(found, tuple) else (found,))], dim=1)
            for found in engine.per_sample_gradients().values()
        ]
        widest = max(slot.shape[1] for slot in slots)
        rows.append(torch.stack([F.pad(slot, (0, widest - slot.shape[1])) for slot in slots], dim=1))
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.stepped:
            return optimizer.signals, torch.cat(rows)
    raise AssertionError("no step")


@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_flat_clipping_against_gradients_by_hand(method: Method, physical: int | None) -> None:
    _, gradients = first_step(private(method))
    norms = gradients.flatten(1).norm(dim=1)
    threshold = float(norms.median()) * 1.01  # not one of the norms
    signals, _ = first_step(private(method, max_physical_batch_size=physical, max_grad_norm=threshold))
    clipped = gradients * (threshold / norms).clamp(max=1)[:, None, None]
    share = float((norms > threshold).double().mean())
    assert 0.2 < share < 0.8
    assert signals.units == len(gradients) and float(signals.clip_share or 0) == pytest.approx(share)
    assert float(signals.signal_norm) == pytest.approx(float(clipped.sum(0).norm()) / 8, rel=1e-5)
    assert signals.noise_norm == 0 and float(signals.update_norm) == float(signals.signal_norm)


def test_per_layer_clipping_counts_a_sample_by_the_share_of_its_parameters() -> None:
    _, gradients = first_step(private(DPSGD()))
    norms = gradients.norm(dim=2)
    threshold = float(norms.median()) * 1.01  # not one of the norms
    joint = threshold * math.sqrt(gradients.shape[1])
    signals, _ = first_step(private(DPSGD(), clipping="per_layer", max_grad_norm=joint))
    share = float((norms > threshold).double().mean())
    assert 0.2 < share < 0.8 and float(signals.clip_share or 0) == pytest.approx(share)


def test_automatic_clipping_has_no_share() -> None:
    signals, gradients = first_step(private(DPSGD(), clipping="automatic"))
    flat = gradients.flatten(1)
    wanted = (flat * (C / (flat.norm(dim=1) + 0.01))[:, None]).sum(0).norm() / 8
    assert signals.clip_share is None and float(signals.signal_norm) == pytest.approx(float(wanted), rel=1e-5)


def test_a_sum_is_not_divided() -> None:
    mean, _ = first_step(private(DPSGD(), noise_multiplier=1.0))
    _, model, optimizer, loader = private(DPSGD(), noise_multiplier=1.0, loss_reduction="sum")
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y, reduction="sum").backward()
    optimizer.step()
    for name in ("signal_norm", "noise_norm", "update_norm"):
        assert float(getattr(optimizer.signals, name)) == pytest.approx(8 * float(getattr(mean, name)), rel=1e-5)


def test_units_are_counted_not_rows() -> None:
    _, model, optimizer, loader = private(DPSGD(), views=3)
    x, y = next(iter(loader))
    F.cross_entropy(model(x.repeat_interleave(3, dim=0)), y.repeat_interleave(3, dim=0)).backward()
    optimizer.step()
    assert optimizer.signals.units == len(x)
    once, _ = first_step(private(DPSGD()))  # three equal rows are one
    assert float(optimizer.signals.clipped) == float(once.clipped)
    assert float(optimizer.signals.signal_norm) == pytest.approx(float(once.signal_norm), rel=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_noise_has_the_length_that_is_told(method: Method) -> None:
    """The length of Gaussian noise in d numbers is off by 1/sqrt(2d): 6 of these for d >= 50, false alarm 2e-9."""
    signals, _ = first_step(private(method, noise_multiplier=200.0))  # next to it the signal is nothing
    assert float(signals.update_norm) == pytest.approx(signals.noise_norm, rel=6 / math.sqrt(2 * 50))
    engine, *_ = private(method, noise_multiplier=200.0)
    dimensions = sum(slot.dimensions for slot in engine._recorder.ready().values())
    assert signals.noise_norm == pytest.approx(200.0 * C * math.sqrt(dimensions) / 8, rel=1e-3)


def test_an_empty_draw_is_noise_alone() -> None:
    _, model, optimizer, loader = private(DPSGD(), batch_size=1, noise_multiplier=1.0)
    seen: list[StepSignals] = []
    for _ in range(3):
        for x, y in loader:
            seen.append(optimizer.signals)  # before this batch's own step: an empty draw may have come between
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    empty = next(signals for signals in seen if signals is not None and signals.units == 0)
    assert empty.clip_share is None and float(empty.signal_norm) == 0 < float(empty.update_norm)


def test_there_are_none_before_a_step_and_without_privacy() -> None:
    _, model, optimizer, loader = private(NonPrivate())
    assert optimizer.signals is None
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.signals is None


class NoReading(TorchDispatchMode):
    """Fails where a number is read off a tensor: on a GPU that waits."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "a number was read"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["flat", "per_layer", "automatic"])
def test_nothing_waits_for_a_measurement(mode: Any) -> None:
    with NoReading():
        parts = [[torch.randn(5, 7)], [torch.randn(5, 3)]]
        clipper = Clipper(mode, 1.0)
        total = clipper.clip(parts, 1.0) + clipper.clip(parts, 1.0)
        noisy = add_noise(total, 1.0, TorchNoise(torch.Generator().manual_seed(0)))
        signals = measure(total, noisy, divisor=10, mode=mode)
        with pytest.raises(AssertionError, match="a number was read"):
            float(signals.signal_norm)


def test_a_batch_that_is_continued_has_the_signals_of_one_that_is_not() -> None:
    cut, continued = Training(), Training()
    stop_at(cut, "micro-batches")
    state = cut.engine.state_dict()
    continued.model.load_state_dict(cut.model.state_dict())
    continued.optimizer.load_state_dict(copy.deepcopy(cut.optimizer.state_dict()))
    seen = []
    for training in (cut, continued):
        if training is continued:
            training.engine.load_state_dict(state)  # puts torch's random state back, too
        next(training.loop)
        while not training.trace[-1][2]:
            next(training.loop)
        found = training.optimizer.signals
        assert found is not None
        seen.append((found.units, float(found.clipped), float(found.signal_norm), float(found.update_norm)))
    assert seen[0] == seen[1]


def test_sums_that_were_saved_before_there_were_signals_load() -> None:
    cut, continued = Training(), Training()
    stop_at(cut, "micro-batches")
    state = cut.engine.state_dict()
    before = state["progress"]["partial_sum"]
    state["progress"]["partial_sum"] = {"vector": before["vector"], "bound": before["bound"]}
    continued.engine.load_state_dict(state)
    next(continued.loop)
    assert continued.optimizer.gradients.sum is not None or continued.optimizer.signals is not None
