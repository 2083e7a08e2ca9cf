"""Rules through the GPU's kernels for images: what leads into them and out, with plain PyTorch in their place.

The kernels themselves are checked on a GPU, by benchmarks/gpu_kernels.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.layers import conv, conv_kernel, group_norm_kernel
from lsg.layers.calls import untransformed
from lsg.layers.factor_gradient import select
from lsg.layers.recorder import _install_faster
from lsg.layers.site import Batch, site_of, uninstall
from lsg.methods import Method
from tests.layers.test_rules import CASES, METHODS, test_rule_equals_batch_of_one


def patch_products(h: Tensor, x: Tensor, *geometry: object, **options: object) -> Tensor:
    taps, stride, padding, dilation, kept, place = (*geometry, None, None)[:6]
    if kept is not None:
        assert torch.equal(place[kept], torch.arange(len(kept)))
    return select(conv._patch_products(h, x, taps, stride, padding, dilation), kept)


def normalise(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.unflatten(1, (groups, -1)).flatten(2)
    mean, rstd = grouped.mean(2), 1 / (grouped.var(2, unbiased=False) + eps).sqrt()
    of_channels = (t.repeat_interleave(x.shape[1] // groups, dim=1) for t in (mean, rstd))
    return (F.group_norm(x, groups, weight, bias, eps).to(dtype), *of_channels)


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
    monkeypatch.setattr(conv_kernel, "pays", lambda x, g, groups: x.dim() == 4 and groups == 1 and untransformed())
    monkeypatch.setattr(group_norm_kernel, "pays", lambda x, groups: x.dim() == 4 and untransformed())
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


def test_a_norm_that_trains_nothing_takes_the_kernel_and_gives_it_back(with_kernels: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.ReLU(), nn.GroupNorm(4, 4))
    model[2].requires_grad_(False)
    x = torch.randn(3, 4, 5, 5, requires_grad=True)
    wanted = torch.autograd.grad(model(x).square().sum() + model(x)[0].sum(), x)[0]
    norms = _install_faster(model, Batch(lambda size: None))
    found = torch.autograd.grad(model(x).square().sum() + model(x)[0].sum(), x)[0]
    assert with_kernels.count("normalise") == 4
    torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        model(x)
    assert with_kernels.count("normalise") == 6, "in evaluation too"
    for module in norms:
        uninstall(module)
    assert norms == [model[0], model[2]]
    assert all(site_of(module) is None and "forward" not in module.__dict__ for module in model)


def test_a_norm_of_other_shapes_stays_pytorchs(with_kernels: list[str]) -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4, affine=False))
    x = torch.randn(3, 4, 5)
    wanted = model(x)
    _install_faster(model, Batch(lambda size: None))
    assert torch.equal(model(x), wanted)
    assert not with_kernels
