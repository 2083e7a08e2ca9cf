"""One private step: against Eq. 1, against Opacus, and the same whichever way it is computed."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, LSG, RGP, PrivacyEngine, SparseDPSGD
from lsg.methods import Method
from tests.support.reference import attach, batch_of_one_gradients, paper_matrix, project, relative_error

B, C = 6, 0.7


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 24)]
    return nn.Sequential(*body, nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 5)).to(dtype)


def samples(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(B, 3, 6, 6, generator=generator, dtype=dtype), torch.randint(0, 5, (B,), generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def naive_update(model: nn.Module, engine: PrivacyEngine, expected_batch: int) -> dict[str, Tensor]:
    """Project, clip jointly, sum, lift with Eq. 1 as it is printed, divide: the gradient handed to the optimizer."""
    grads = batch_of_one_gradients(model, samples(), B, loss)
    spaces = engine.subspaces
    factors = {n: project(g, spaces[n]) if n in spaces else (g,) for n, g in grads.items()}
    squares = sum(part.flatten(1).square().sum(1) for parts in factors.values() for part in parts)
    clip = (C / squares.sqrt()).clamp(max=1.0)
    update = {}
    for name, parts in factors.items():
        sums = [torch.einsum("b,b...->...", clip, part) / expected_batch for part in parts]
        if name in spaces:
            left, right = spaces[name].left, spaces[name].right
            d_left, d_right = sums
            lifted = d_left @ right + left @ d_right - left @ left.T @ d_left @ right
            update[name] = (lifted.T if spaces[name].transposed else lifted).reshape(grads[name].shape[1:])
        else:
            update[name] = sums[0]
    return update


@pytest.mark.parametrize("method", [LSG(rank=2, sparsity=0.4), RGP(rank=3), DPSGD()], ids=str)
def test_step_equals_equation_one(method: Method) -> None:
    model = network()
    engine, optimizer, _ = attach(model, method, max_grad_norm=C, batch_size=4)
    wanted = naive_update(model, engine, expected_batch=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss(model, samples()).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert relative_error(before[name] - p.detach(), wanted[name]) < 1e-10, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_are_orthonormal_and_masks_follow_importance(dtype: torch.dtype) -> None:
    model = network(dtype)
    engine, _, _ = attach(model, LSG(rank=3, sparsity=0.25))
    weights = dict(model.named_parameters())
    assert set(engine.subspaces) == {"0.weight", "4.weight", "7.weight"}
    for name, space in engine.subspaces.items():
        identity = torch.eye(3, dtype=dtype)
        assert (space.left.T @ space.left - identity).abs().max() < 1e-6
        assert (space.right @ space.right.T - identity).abs().max() < 1e-6
        w = paper_matrix(weights[name].detach().unsqueeze(0), space)[0]
        assert w.shape == (space.left.shape[0], space.right.shape[1])
        if name == "0.weight":  # convolution: L on output channels, all taps of an input channel together
            assert space.left.shape == (8, 3) and space.right.shape == (3, 27)
            assert torch.equal(space.right_mask.view(3, 9).any(1), space.right_mask.view(3, 9).all(1))
            columns = w.abs().sum(0).view(3, 9).sum(1)
            masks = [(w.abs().sum(1), space.left_mask), (columns, space.right_mask.view(3, 9)[:, 0])]
        else:  # linear: L on the inputs
            assert space.left.shape[0] == weights[name].shape[1]
            masks = [(w.abs().sum(1), space.left_mask), (w.abs().sum(0), space.right_mask)]
        for importance, mask in masks:
            assert int((~mask).sum()) == int(0.25 * len(mask))
            if not mask.all():
                assert importance[mask].min() >= importance[~mask].max()


def test_subspace_captures_a_low_rank_weight() -> None:
    """On a weight that has rank 3, one power step finds its row and column spaces exactly."""
    model = nn.Linear(20, 30, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(30, 3, dtype=torch.float64) @ torch.randn(3, 20, dtype=torch.float64))
    engine, _, _ = attach(model, RGP(rank=3))
    space = engine.subspaces["weight"]
    w = model.weight.detach().T
    assert relative_error(space.left @ space.left.T @ w @ space.right.T @ space.right, w) < 1e-10


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # Opacus
def test_full_rank_without_sparsity_is_dpsgd_and_opacus() -> None:
    results = []
    for method in (DPSGD(), LSG(rank=1000, sparsity=0.0), SparseDPSGD(sparsity=0.0)):
        model = network(torch.float32)
        engine, optimizer, _ = attach(model, method, max_grad_norm=C, batch_size=4)
        loss(model, samples(torch.float32)).backward()
        per_sample = engine.per_sample_gradients()
        optimizer.step()
        results.append((per_sample, {name: p.grad * 4 for name, p in model.named_parameters()}))

    peer = GradSampleModule(network(torch.float32))
    opacus = DPOptimizer(
        torch.optim.SGD(peer.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=C, expected_batch_size=4
    )
    loss(peer, samples(torch.float32)).backward()
    grad_samples = {name.removeprefix("_module."): p.grad_sample.clone() for name, p in peer.named_parameters()}
    opacus.step()
    clipped = {name.removeprefix("_module."): p.summed_grad for name, p in peer.named_parameters()}
    for per_sample, sums in results:
        for name in grad_samples:
            assert relative_error(per_sample[name], grad_samples[name]) < 1e-5, name
            assert relative_error(sums[name], clipped[name]) < 1e-5, name


@pytest.mark.parametrize("method", [LSG(rank=2, sparsity=0.4), DPSGD()], ids=str)
def test_micro_batch_size_does_not_change_the_steps(method: Method) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(60, 3, 6, 6, generator=generator), torch.randint(0, 5, (60,), generator=generator))
    finals = []
    for size in (1, 7, None):
        model = network(torch.float32)
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(data, batch_size=20, generator=torch.Generator().manual_seed(3)),
            noise_multiplier=1.0,
            max_grad_norm=C,
            method=method,
            max_physical_batch_size=size,
            noise_generator=torch.Generator().manual_seed(4),
        )
        real_steps = 0
        for batch in loader:
            assert size is None or len(batch[0]) <= size
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            real_steps += optimizer.stepped
        assert real_steps == loader.steps(1) == len(engine.accountant) == 3
        finals.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in finals[1:]:
        assert (finals[0] - other).abs().max() < 1e-5


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x: Tensor) -> Tensor:
        # Reentrant checkpointing only differentiates where an input asks for it.
        out = checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)
        assert isinstance(out, Tensor)
        return out


def gradients(model: nn.Module, runner: Any = None, **options: Any) -> dict[str, Any]:
    engine, optimizer, _ = attach(
        model, LSG(rank=2, sparsity=0.4), noise_generator=torch.Generator().manual_seed(0), **options
    )
    dtype = next(model.parameters()).dtype
    loss(runner or model, samples(dtype)).backward()
    found = engine.per_sample_gradients()
    optimizer.zero_grad()
    return found


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float, prefix: str = "") -> None:
    for name, value in wanted.items():
        one, other = found[prefix + name], value
        pairs = zip(one, other, strict=True) if isinstance(other, tuple) else [(one, other)]
        for a, b in pairs:
            assert relative_error(a, b) < tolerance, name


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    assert_same(gradients(Checkpointed(network(), reentrant)), gradients(network()), 1e-12, prefix="body.")


def test_autocast_gives_the_gradients_in_lower_precision() -> None:
    wanted = gradients(network(torch.float32))
    model = network(torch.float32)
    engine, optimizer, _ = attach(model, LSG(rank=2, sparsity=0.4), noise_generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(samples(torch.float32)[0])
        value = F.cross_entropy(output.float(), samples(torch.float32)[1])
    assert output.dtype == torch.bfloat16
    value.backward()
    found = engine.per_sample_gradients()
    assert_same(found, wanted, 5e-2)
    # The step itself is taken in float32.
    optimizer.step()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own compiler
def test_compiled_model_gives_the_same_gradients() -> None:
    model = network(torch.float32)
    compiled = torch.compile(model)
    assert_same(gradients(model, compiled), gradients(network(torch.float32)), 1e-5)


def test_low_precision_parameters_are_clipped_and_noised_in_float32() -> None:
    model = network(torch.bfloat16)
    _engine, optimizer, _ = attach(model, LSG(rank=2, sparsity=0.4), noise_multiplier=1.0, max_grad_norm=1.0)
    loss(model, samples(torch.bfloat16)).backward()
    optimizer.gradients.collect(None)
    assert optimizer.gradients.sum.vector.dtype == torch.float32
    optimizer.step()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_two_forwards_before_one_backward_sum_their_gradients() -> None:
    """A sample that is used twice in one loss (siamese networks) has the gradient of the sum."""

    def twice(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]) + model(batch[0].flip(-1)), batch[1])

    model = network()
    engine, _, _ = attach(model, LSG(rank=2, sparsity=0.4))
    twice(model, samples()).backward()
    wanted = batch_of_one_gradients(model, samples(), B, twice)
    spaces = engine.subspaces
    for name, found in engine.per_sample_gradients().items():
        expected = project(wanted[name], spaces[name]) if name in spaces else (wanted[name],)
        pairs = zip(found if name in spaces else (found,), expected, strict=True)
        assert all(relative_error(a, b) < 1e-10 for a, b in pairs), name


def test_sum_reduction_is_a_sum_as_in_opacus() -> None:
    wanted = gradients(network())
    model = network()
    engine, optimizer, _ = attach(
        model,
        LSG(rank=2, sparsity=0.4),
        noise_generator=torch.Generator().manual_seed(0),
        loss_reduction="sum",
    )
    (loss(model, samples()) * B).backward()
    assert_same(engine.per_sample_gradients(), wanted, 1e-12)
    optimizer.step()
    biases = engine_bias_sum(wanted)
    assert relative_error(model[7].bias.grad, biases) < 1e-10


def engine_bias_sum(per_sample: dict[str, Any]) -> Tensor:
    bias: Tensor = per_sample["7.bias"].sum(0)
    return bias


def test_a_copy_taken_in_training_is_a_plain_model() -> None:
    model = network()
    engine, _, _ = attach(model, LSG(rank=2, sparsity=0.4))
    loss(model, samples()).backward()
    twin = copy.deepcopy(model)
    loss(twin, samples()).backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert engine.per_sample_gradients()
