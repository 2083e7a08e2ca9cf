"""Run on a GPU machine: the kernels for images laid out channels last against float64, and their times.

    python benchmarks/gpu_image_kernels.py

One line a check, with the largest relative error; then times. Ends with status 1 if a check failed.
"""

import itertools
import sys

import torch
import torch.nn.functional as F
from gpu_kernels import BF16, FAILED, FP32, milliseconds, report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, LSG, PerfConfig, PrivacyEngine
from lsg.kernels import conv_kernel, conv_reference, group_norm_kernel
from lsg.kernels.optional_triton import without_kernels
from lsg.methods import Method

GEOMETRIES = {  # taps, stride, padding, dilation
    "3x3": ((3, 3), (1, 1), (1, 1), (1, 1)),
    "3x3 stride 2": ((3, 3), (2, 2), (1, 1), (1, 1)),
    "1x1": ((1, 1), (1, 1), (0, 0), (1, 1)),
    "3x2 dilated": ((3, 2), (1, 2), (0, 2), (2, 1)),
}
CASES = (("3x3", 3, 16), ("3x3 stride 2", 32, 16), ("1x1", 128, 3), ("3x2 dilated", 20, 70))


def main() -> int:
    torch.manual_seed(0)
    print(f"{torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    for dtype in (BF16, FP32):
        for name, channels, ranks in CASES:
            check_products(dtype, name, channels, ranks)
        for channels, groups in ((32, 16), (130, 13), (512, 1)):
            check_norm(dtype, channels, groups)
    torch.backends.cudnn.allow_tf32 = False
    for method, graphs in itertools.product((LSG(rank=16, sparsity=0.3), DPSGD()), (False, True)):
        check_model(method, graphs)
    time_all()
    print(f"{len(FAILED)} failed {FAILED}", flush=True)
    return 1 if FAILED else 0


def images(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype, memory_format=torch.channels_last)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def check_products(dtype: torch.dtype, name: str, channels: int, ranks: int) -> None:
    taps, stride, padding, dilation = geometry = GEOMETRIES[name]
    x = images(9, channels, 13, 12, dtype=dtype)
    like = F.conv2d(x[:, :1], x.new_zeros(1, 1, *taps), None, stride, padding, dilation)
    h = images(9, ranks, *like.shape[2:], dtype=dtype)
    wanted = conv_reference.patch_products(h.double(), x.double(), *geometry)
    entries = wanted.shape[2]
    kept = torch.randperm(entries, device="cuda")[: max(1, entries // 3)].sort().values
    place = torch.full((entries,), -1, dtype=torch.int32, device="cuda")
    place[kept] = torch.arange(len(kept), dtype=torch.int32, device="cuda")
    label = f"products {str(dtype)[6:]} {name}, {channels} channels, {ranks} ranks"
    tolerance = 1e-6 if dtype is BF16 else 5e-6  # three tf32 products in place of a float32 one
    report(label, error(conv_kernel.patch_products(h, x, *geometry), wanted), tolerance)
    masked = conv_kernel.patch_products(h, x, *geometry, kept, place)
    report(f"{label}, masked", error(masked, wanted[..., kept]), tolerance)


def check_norm(dtype: torch.dtype, channels: int, groups: int) -> None:
    x, g = images(64, channels, 13, 12, dtype=dtype), images(64, channels, 13, 12)
    x += 3
    weight, bias = torch.randn(2, channels, device="cuda")
    assert group_norm_kernel.is_faster(x, groups)
    y, mean, rstd = group_norm_kernel.normalise(x, groups, weight, bias, 1e-5, FP32)
    found = (y, *group_norm_kernel.differentiate(g, x, groups, weight, mean, rstd))
    leaves = [t.double().expand(64, *t.shape).clone().requires_grad_() for t in (weight, bias)]
    x_64 = x.double().requires_grad_()
    y_64 = F.group_norm(x_64, groups, None, None, 1e-5) * leaves[0][..., None, None] + leaves[1][..., None, None]
    wanted = (y_64.detach(), *torch.autograd.grad(y_64, (x_64, *leaves), g.double()))
    for part, a, b in zip(("output", "input", "scale", "shift"), found, wanted, strict=True):
        tolerance = 4e-3 if part == "input" and dtype is BF16 else 3e-6  # that gradient is rounded to the input's
        report(f"group norm {str(dtype)[6:]} {channels} channels, {groups} groups: {part}", error(a, b), tolerance)


def network() -> nn.Module:
    """Smooth: where a ReLU turns on or off by rounding, one position of 64 in a last layer counts or does not."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.GroupNorm(16, 32, affine=False),
        nn.SiLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.GroupNorm(8, 64),
        nn.SiLU(),
        nn.Conv2d(64, 128, 1, bias=False),  # the norm would take it out again
        nn.InstanceNorm2d(128, affine=True),
        nn.SiLU(),
        nn.Conv2d(128, 64, (2, 3), dilation=2, padding="same"),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def per_sample(method: Method, graphs: bool) -> list[Tensor]:
    """Of the network's first batch or, with graphs, of their first replay."""
    torch.manual_seed(1)
    model = network().to("cuda", memory_format=torch.channels_last)
    x, y = images(64, 3, 32, 32), torch.randint(10, (64,), device="cuda")
    engine = PrivacyEngine()
    private, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=64),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        method=method,
        poisson_sampling=False,
        noise_generator=torch.Generator("cuda").manual_seed(0),
        perf=PerfConfig(cuda_graphs=graphs),
    )
    for _ in range(3 if graphs else 1):
        optimizer.zero_grad()
        F.cross_entropy(private(x), y).backward()
    return [part.clone() for parts in engine._recorder.per_sample() for part in parts if isinstance(part, Tensor)]


def check_model(method: Method, graphs: bool) -> None:
    with without_kernels():
        wanted = per_sample(method, False)
    found = per_sample(method, graphs)
    worst = max(error(a, b.double()) for a, b in zip(found, wanted, strict=True))
    report(f"a network in float32, {method}{', recorded' if graphs else ''}", worst, 1e-4)


def time_all() -> None:
    """The sizes of wrn28-2's stages, 500 images in bfloat16."""
    for channels, size in ((32, 32), (64, 16), (128, 8)):
        x, h = (images(500, c, size, size, dtype=BF16) for c in (channels, 16))
        g = images(500, channels, size, size)
        _, mean, rstd = group_norm_kernel.normalise(x, 16, None, None, 1e-5, FP32)
        leaf = x.clone().requires_grad_()
        plain = F.group_norm(leaf.float(), 16, None, None, 1e-5)
        times = {
            "products": lambda x=x, h=h: conv_kernel.patch_products(h, x, *GEOMETRIES["3x3"]),
            "plain": lambda x=x, h=h: conv_reference.patch_products(h, x, *GEOMETRIES["3x3"]),
            "norm": lambda x=x: group_norm_kernel.normalise(x, 16, None, None, 1e-5, FP32),
            "plain norm": lambda x=x: F.group_norm(x.float(), 16, None, None, 1e-5),
            "its backward": lambda x=x, g=g, m=mean, r=rstd: group_norm_kernel.differentiate(g, x, 16, None, m, r),
            "plain backward": lambda p=plain, leaf=leaf, g=g: torch.autograd.grad(p, leaf, g, retain_graph=True),
        }
        text = ", ".join(f"{name} {1e3 * milliseconds(run):.0f}" for name, run in times.items())
        print(f"us, bfloat16, 500 x {channels} x {size} x {size}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
