"""Rules through the GPU's kernels for images: what leads into them and out, with plain PyTorch in their place.

The kernels themselves are checked on a GPU, by benchmarks/gpu_image_kernels.py.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, PrivacyEngine
from lsg.kernels import conv_kernel, conv_reference, group_norm_kernel, optional_triton
from lsg.kernels.factor_gradient import select
from lsg.kernels.optional_triton import untransformed
from lsg.layers.group_norm import frozen_group_norm_forward
from lsg.layers.install import install as put_on
from lsg.layers.install import is_private, patch_of, uninstall
from lsg.layers.patched_module import Batch, PatchedModule
from lsg.methods import Method
from lsg.model.module_rules import install_faster
from tests.layers.test_rules import CASES, METHODS, test_rule_equals_batch_of_one
from tests.support.reference import attach, batch_of_one_gradients


def patch_products(h: Tensor, x: Tensor, *geometry: object) -> Tensor:
    taps, stride, padding, dilation, kept, place = (*geometry, None, None)[:6]
    if kept is not None:
        assert torch.equal(place[kept], torch.arange(len(kept)))
    return select(conv_reference.patch_products(h, x, taps, stride, padding, dilation), kept)


def normalise(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.unflatten(1, (groups, -1)).flatten(2)
    mean, rstd = grouped.mean(2), 1 / (grouped.var(2, unbiased=False) + eps).sqrt()
    of_channels = (t.repeat_interleave(x.shape[1] // groups, dim=1) for t in (mean, rstd))
    y = F.group_norm(x, groups, weight, bias, eps).to(dtype, memory_format=torch.channels_last)
    return (y, *of_channels)


def differentiate(
    g: Tensor, x: Tensor, groups: int, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    normalised = (x - mean[..., None, None]) * rstd[..., None, None]
    weighted = g if weight is None else g * weight[:, None, None]

    def averaged(values: Tensor) -> Tensor:
        return (
            values.unflatten(1, (groups, -1)).mean((2, 3, 4), keepdim=True).expand(x.unflatten(1, (groups, -1)).shape)
        )

    inner = weighted - averaged(weighted).flatten(1, 2) - normalised * averaged(weighted * normalised).flatten(1, 2)
    return rstd[..., None, None] * inner, (g * normalised).sum((2, 3)), g.sum((2, 3))


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plain PyTorch in place of the kernels, on a CPU. Returns the names of those that were called."""
    called: list[str] = []
    monkeypatch.setattr(conv_kernel, "is_faster", lambda x, g, groups: x.dim() == 4 and groups == 1 and untransformed())
    monkeypatch.setattr(group_norm_kernel, "is_faster", lambda x, groups: x.dim() == 4 and untransformed())
    monkeypatch.setattr(optional_triton, "AVAILABLE", True)
    for module, stand_in in (
        (conv_kernel, patch_products),
        (group_norm_kernel, normalise),
        (group_norm_kernel, differentiate),
    ):

        def call(*args: object, stand_in: object = stand_in) -> object:
            called.append(stand_in.__name__)  # type: ignore[attr-defined]
            return stand_in(*args)  # type: ignore[operator]

        monkeypatch.setattr(module, stand_in.__name__, call)
    return called


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.startswith(("conv2d", "group_norm", "instance_norm"))])
def test_rules_equal_batch_of_one(case: str, method: Method, with_kernels: list[str]) -> None:
    test_rule_equals_batch_of_one(case, method)
    grouped = case in ("conv2d_groups", "conv2d_depthwise", "instance_norm_1d")
    assert bool(with_kernels) != grouped


def install(model: nn.Module) -> list[nn.Module]:
    return [module for module, _ in install_faster(model, checked_batch())]


def checked_batch() -> Batch:
    batch = Batch()
    batch.channels_last_norms = True
    return batch


def test_a_norm_that_trains_nothing_takes_the_kernel_and_gives_it_back(with_kernels: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.ReLU(), nn.GroupNorm(4, 4))
    model[2].requires_grad_(False)
    x = torch.randn(3, 4, 5, 5, requires_grad=True)
    wanted = torch.autograd.grad(model(x).square().sum() + model(x)[0].sum(), x)[0]
    norms = install(model)
    assert not is_private(model)
    found = torch.autograd.grad(model(x).square().sum() + model(x)[0].sum(), x)[0]
    assert with_kernels.count("normalise") == 4
    torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        model(x)
    assert with_kernels.count("normalise") == 6, "in evaluation too"
    assert install(copy.deepcopy(model)), "a copy has an inert patch alone"
    for module in norms:
        uninstall(module, patch_of(module))  # type: ignore[arg-type]
    assert norms == [model[0], model[2]]
    assert all(patch_of(module) is None and "forward" not in module.__dict__ for module in model)


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4, 1, 1)], ids=["a sequence", "one value a group"])
def test_a_norm_of_other_shapes_stays_pytorchs(shape: tuple[int, ...], with_kernels: list[str]) -> None:
    model, x = nn.GroupNorm(4, 4, affine=False).eval(), torch.randn(shape)
    plain = copy.deepcopy(model)
    install(model)
    for norm in (plain, model):
        if shape[0] == 1:
            with pytest.raises(ValueError, match="more than 1 value"):
                norm(x)
        else:
            assert torch.equal(norm(x), plain(x))
    assert not with_kernels


class Viewed(nn.Module):
    """Takes a norm's output for contiguous, as PyTorch's is on a GPU."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.norm, self.head, self.view = nn.GroupNorm(2, 4), nn.Linear(100, 3), view

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.head(y.view(len(x), -1) if self.view else y.flatten(1))


@pytest.mark.parametrize("view", [False, True])
def test_a_model_that_views_a_norms_output_keeps_pytorchs(view: bool, with_kernels: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Viewed(view), torch.randn(5, 4, 5, 5)
    wanted = batch_of_one_gradients(model, x, 5, lambda model, x: model(x).square().mean())
    engine, *_ = attach(model, DPSGD())
    with torch.no_grad():
        model(x)
    assert not with_kernels, "not before the model was seen to bear it"
    loss = model(x).square().mean()
    tried = with_kernels.copy()
    with_kernels.clear()
    loss.backward()
    assert tried and ("differentiate" in with_kernels) != view
    for name, gradient in engine.per_sample_gradients().items():
        torch.testing.assert_close(gradient, wanted[name])


def test_a_norm_for_other_channels_is_refused_by_pytorch(with_kernels: list[str]) -> None:
    model = nn.GroupNorm(4, 8).requires_grad_(False)
    install(model)
    with pytest.raises(RuntimeError, match="weight"):
        model(torch.randn(2, 16, 4, 4))
    assert not with_kernels


def test_scale_and_shift_reach_the_kernel_contiguous(with_kernels: list[str]) -> None:
    model = nn.GroupNorm(2, 4)
    model.weight = nn.Parameter(torch.rand(8)[::2], requires_grad=False)
    model.bias = nn.Parameter(torch.rand(1).expand(4), requires_grad=False)
    seen = group_norm_kernel.normalise

    def normalise_contiguous(x: Tensor, groups: int, weight: Tensor, bias: Tensor, *rest: object) -> object:
        assert weight.is_contiguous() and bias.is_contiguous()
        return seen(x, groups, weight, bias, *rest)

    group_norm_kernel.normalise = normalise_contiguous  # the fixture puts it back
    x = torch.randn(3, 4, 5, 5)
    wanted = model(x)
    install(model)
    torch.testing.assert_close(model(x), wanted)
    assert with_kernels == ["normalise"]


def test_another_engines_rule_takes_the_place_of_a_faster_forward(with_kernels: list[str]) -> None:
    model = nn.GroupNorm(2, 4)
    ((_, faster),) = install_faster(model, checked_batch())
    rule = PatchedModule("norm", {}, checked_batch(), frozen_group_norm_forward, "forward")
    put_on(model, rule)
    uninstall(model, faster)
    assert patch_of(model) is rule, "the other engine's stays when the first is detached"
    uninstall(model, rule)
    uninstall(model, faster)
    assert patch_of(model) is None and "forward" not in model.__dict__


def test_a_norm_with_a_forward_of_its_own_keeps_it(with_kernels: list[str]) -> None:
    model = nn.GroupNorm(2, 4, affine=False)
    model.forward = lambda x: x * 0 + 7  # type: ignore[method-assign]
    assert install(model) == []
    assert float(model(torch.randn(3, 4, 5, 5)).mean()) == 7


def test_a_norm_that_another_optimizer_trains_gets_its_gradient(with_kernels: list[str]) -> None:
    model = nn.GroupNorm(2, 4)
    install(model)
    model(torch.randn(3, 4, 5, 5)).square().sum().backward()
    assert model.weight.grad is not None
    assert not with_kernels


def test_a_norm_that_trains_nothing_has_second_derivatives(with_kernels: list[str]) -> None:
    model = nn.GroupNorm(2, 4).double().requires_grad_(False)
    nn.init.uniform_(model.weight)
    plain, x = copy.deepcopy(model), torch.randn(3, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    install(model)
    found, wanted = [], []
    for norm, results in ((model, found), (plain, wanted)):
        (first,) = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
        results += [first, *torch.autograd.grad(first.square().sum(), x)]
    assert "normalise" in with_kernels
    torch.testing.assert_close(found, wanted)


def test_norms_in_checkpoints_are_the_same_again(with_kernels: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4, affine=False), nn.SiLU())
    install(model)
    x = torch.randn(3, 4, 5, 5)
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert with_kernels.count("normalise") == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trained_norm_returns_what_pytorchs_returns(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4)).to(dtype)
    x = torch.randn(3, 4, 5, 5, dtype=dtype)
    wanted = model(x).dtype
    engine = PrivacyEngine()
    private, *_ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x), batch_size=3),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=DPSGD(),
    )
    assert private(x).dtype == wanted
