"""For any architecture, method and batch size: per-sample gradients are those of a batch of one."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lsg import DPSGD, LSG
from lsg.methods import Method
from tests.support.architectures import DETERMINISTIC, Bare, Blueprint, blueprints, mean_loss, methods, sample_losses
from tests.support.factored import factored
from tests.support.oracle import assert_close, found_gradients, wanted_gradients
from tests.support.reference import assert_per_sample_gradients, attach


@settings(DETERMINISTIC, max_examples=80)
@given(blueprints(), methods(), st.integers(1, 4), st.booleans())
def test_per_sample_gradients_equal_those_of_a_batch_of_one(
    plan: Blueprint, method: Method, size: int, factors: bool
) -> None:
    """factors: dense weights leave the factors of their gradients, as on a GPU."""
    assume(not plan.ambiguous(size))
    model, batch = plan.build(), plan.samples(size)
    engine, _, _ = attach(model, method)
    with factored(factors):
        mean_loss(model, batch).backward()
    assert_close(found_gradients(engine), wanted_gradients(model, engine, batch), 1e-9)
    assert all(p.grad is None for p in model.parameters() if p.requires_grad)


@settings(DETERMINISTIC, max_examples=25)
@given(blueprints(), methods())
def test_single_precision_agrees_to_its_rounding(plan: Blueprint, method: Method) -> None:
    assume(not plan.ambiguous(3))
    model, batch = plan.build(torch.float32), plan.samples(3, torch.float32)
    engine, _, _ = attach(model, method)
    mean_loss(model, batch).backward()
    assert_close(found_gradients(engine), wanted_gradients(model, engine, batch), 1e-4)


@settings(DETERMINISTIC, max_examples=25)
@given(blueprints(), methods())
def test_bfloat16_autocast_agrees_to_its_rounding_and_keeps_samples_apart(plan: Blueprint, method: Method) -> None:
    """Each sample's gradient is the same whoever else is in the batch, though computed in bfloat16."""
    assume(not plan.ambiguous(3))
    model, batch = plan.build(torch.float32), plan.samples(3, torch.float32)
    engine, optimizer, _ = attach(model, method)

    def gradients(samples: Tensor) -> dict[str, tuple[Tensor, ...]]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(samples)
        sample_losses(output.float()).mean().backward()
        found = found_gradients(engine)
        optimizer.zero_grad()
        return found

    together = gradients(batch)
    assert_close(together, wanted_gradients(model, engine, batch), 0.3)
    assert all(part.dtype == torch.float32 for parts in together.values() for part in parts)
    alone = gradients(batch[1:2])
    assert_close({name: tuple(p[1:2] for p in parts) for name, parts in together.items()}, alone, 0.05)


@settings(DETERMINISTIC, max_examples=25)
@given(blueprints(), methods(), st.integers(1, 3))
def test_detach_gives_the_model_back_as_it_was(plan: Blueprint, method: Method, size: int) -> None:
    assume(not plan.ambiguous(size))
    model, batch = plan.build(), plan.samples(size)
    before = _surface(model)
    twin = copy.deepcopy(model)
    engine, _, _ = attach(model, method)
    mean_loss(model, batch).backward()
    engine.detach()
    assert _surface(model) == before
    for one in (model, twin):
        mean_loss(one, batch).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q) and (p.grad is None) == (q.grad is None) and (p.grad is None or p.grad.equal(q.grad))


def _surface(model: nn.Module) -> list[tuple[object, ...]]:
    """All that an engine might have left on a model but the values of its weights."""
    modules = [(name, type(m), sorted(m.__dict__), _hooks(m)) for name, m in model.named_modules()]
    parameters = [
        (name, id(p), p.requires_grad, len(p._post_accumulate_grad_hooks or ())) for name, p in model.named_parameters()
    ]
    return [*modules, *parameters]


def _hooks(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)


# --- what these properties have found -------------------------------------------------------------------------------


def test_instance_norm_of_one_sample_whose_gradient_is_laid_out_channels_last() -> None:
    """torch's own instance norm gets this wrong on a CPU; finite differences tell."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.InstanceNorm2d(4, affine=True)).double()
    x, direction = torch.randn(1, 4, 2, 2, dtype=torch.float64), torch.randn(1, 2, 2, 4, dtype=torch.float64)
    engine, _, _ = attach(model, DPSGD())

    def loss() -> Tensor:
        return (model(x).tanh().permute(0, 2, 3, 1) * direction).sum()

    loss().backward()
    found = found_gradients(engine)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().view(-1)
        for i in range(len(flat)):
            values = []
            for change in (1e-6, -2e-6, 1e-6):  # up, down, back
                with torch.no_grad():
                    flat[i] += change
                    values.append(float(loss()))
            slope = (values[0] - values[1]) / 2e-6
            assert float(found[name][0].view(-1)[i]) == pytest.approx(slope, rel=1e-5, abs=1e-7), name


def test_a_parameter_without_dimensions_is_trained() -> None:
    model = Bare(4)
    before = model.shift.detach().clone()
    _, optimizer, _ = attach(model, DPSGD(), max_grad_norm=1.0)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert model.shift != before


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position, self.layer = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.position(torch.arange(x.shape[1])))


def test_a_batch_of_length_one_after_longer_ones_does_not_mix_samples() -> None:
    """A single position looks like a single sample; the independence check has been and gone."""
    torch.manual_seed(0)
    model = Positioned().double()
    engine, optimizer, _ = attach(model, DPSGD())
    model(torch.randn(3, 4, 6, dtype=torch.float64)).square().flatten(1).sum(1).mean().backward()
    optimizer.step()
    output = model(torch.randn(3, 1, 6, dtype=torch.float64))
    assert output.shape == (3, 1, 6)
    output[1].sum().backward()
    gradient = found_gradients(engine)["position.weight"][0]
    assert gradient[1].any() and not gradient[[0, 2]].any()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_convolution_over_a_single_position_that_came_transposed(size: int) -> None:
    model = nn.Conv1d(4, 4, 3, padding=1).double()
    engine, _, _ = attach(model, DPSGD())
    model(torch.randn(size, 1, 4, dtype=torch.float64).mT).mT.square().sum().backward()
    assert found_gradients(engine)["weight"][0].shape == (size, 4, 4, 3)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)],
    ids=lambda layer: type(layer).__name__,
)
def test_images_folded_into_the_batch_count_for_their_sample(layer: nn.Module) -> None:
    """Four frames of each of two videos."""

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frame = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.frame(x.flatten(0, 1)).flatten(1).unflatten(0, (-1, 4)).flatten(1)

    x = torch.randn(2, 4, 4, 5, 5, dtype=torch.float64)
    assert_per_sample_gradients(Frames().double(), LSG(rank=1), x, 2, lambda m, x: m(x).square().mean())
