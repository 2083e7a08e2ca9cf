"""Run on a GPU machine: clipping's kernels, factored per-sample gradients and recorded refreshes against plain ones.

    python benchmarks/gpu_kernels.py

One line a check, with the largest relative error; then times. Ends with status 1 if a check failed.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, LSG, PerfConfig, PrivacyEngine, SparseDPSGD
from lsg.kernels import exact, norm_kernel, outer_kernel, ragged_kernel, ragged_reference
from lsg.methods import Method
from lsg.parameters import outer
from lsg.parameters.outer import OuterProducts
from lsg.parameters.refresh import Refresh
from lsg.parameters.slot import Layout, Slot
from lsg.parameters.stack import make_stacks
from lsg.step.clipping import Clipper

FAILED: list[str] = []
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = (False, True)


def main() -> int:
    start = time.perf_counter()
    torch.manual_seed(0)
    print(f"{torch.__version__}, {torch.cuda.get_device_name()}, kernel {outer_kernel.AVAILABLE}", flush=True)
    print(f"parts on tensor cores: {exact._MM_HAS_OUT_DTYPE}", flush=True)
    torch.set_float32_matmul_precision("high")  # what is exact must be so all the same
    for dtype in (BF16, FP32):
        for masked in BOTH:
            for m, n in ((768, 768), (768, 3072), (3072, 768), (65, 768)):
                check_products(dtype, m, n, (1, 7, 16, 33), masked)
        check_products(dtype, 768, 65, (7,), False)
    check_products(FP16, 768, 768, (16,), True)
    check_broken()
    check_cancelling()
    check_matrices()
    check_norms()
    report("settings put back", 0.0 if torch.get_float32_matmul_precision() == "high" else 1.0, 0.5)
    torch.set_float32_matmul_precision("highest")
    print(f"[{time.perf_counter() - start:.1f} s]", flush=True)
    for method in (DPSGD(), SparseDPSGD(sparsity=0.5)):
        for autocast, tolerance in ((False, 2e-5), (True, 2e-2)):  # explicit products are rounded to bfloat16
            check_engine(method, autocast, tolerance)
    print(f"[{time.perf_counter() - start:.1f} s]", flush=True)
    check_refresh()
    for dtype in (BF16, FP32):
        for m, n in ((768, 768), (768, 3072), (3072, 768)):
            time_products(dtype, m, n)
    print(f"[{time.perf_counter() - start:.1f} s] {len(FAILED)} failed {FAILED}", flush=True)
    return 1 if FAILED else 0


def report(name: str, error: float, tolerance: float, more: str = "") -> None:
    passed = error <= tolerance  # False for NaN
    if not passed:
        FAILED.append(name)
    print(f"{'ok  ' if passed else 'FAIL'} {name}: {error:.1e} (at most {tolerance:.0e}){more}", flush=True)


def pair(dtype: torch.dtype, batch: int, tokens: int, m: int, n: int, masked: bool = False) -> OuterProducts:
    rows, columns = (torch.randn(batch, tokens, size, device="cuda").to(dtype) for size in (m, n))
    kept = torch.randperm(m * n, device="cuda")[: m * n // 2].sort().values if masked else None
    return OuterProducts(rows, columns, kept)


def explicit(products: OuterProducts) -> Tensor:
    full = (products.rows.double().mT @ products.columns.double()).flatten(1)
    return full if products.kept is None else full.index_select(1, products.kept)


def check_products(dtype: torch.dtype, m: int, n: int, lengths: tuple[int, ...], masked: bool) -> None:
    """Norms and clipped sums against float64."""
    norm_error = sum_error = under = 0.0
    for tokens in lengths:
        products = pair(dtype, 9, tokens, m, n, masked)
        full = explicit(products)
        wanted = full.norm(dim=1)
        relative = products.row_norms() / wanted - 1
        norm_error, under = max(norm_error, float(relative.abs().max())), min(under, float(relative.min()))
        factors = torch.rand(9, device="cuda") + 0.1
        total = factors.double() @ full
        found = products.weighted_sum(factors)
        sum_error = max(sum_error, float((found.double() - total).abs().max() / total.abs().max()))
    label = f"{str(dtype)[6:]} {m}x{n} T={','.join(map(str, lengths))}{' masked' if masked else ''}"
    report(f"norms {label}", norm_error, 1e-6, f", lowest {under:.1e}")
    report(f"sums  {label}", sum_error, 3e-6)


def check_norms() -> None:
    """Per-sample gradients of a layer norm's scale and shift against float64; then the time of one of the encoder's."""
    for dtype in (BF16, FP32):
        for tokens, width in ((1, 768), (20, 768), (33, 100), (128, 3072)):
            x, g = (torch.randn(9, tokens, width, device="cuda").to(dtype) for _ in range(2))
            _, mean, rstd = torch.native_layer_norm(x.float(), (width,), None, None, 1e-5)
            found = norm_kernel.scale_and_shift_gradients(x, g, mean[..., 0], rstd[..., 0])
            normalised = (x.double() - mean.double()) * rstd.double()
            wanted = ((g.double() * normalised).sum(1), g.double().sum(1))
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
            report(f"layer norm {str(dtype)[6:]} {tokens}x{width}", error, 1e-6)
    x, g = (torch.randn(128, 128, 768, device="cuda") for _ in range(2))
    _, mean, rstd = torch.native_layer_norm(x, (768,), None, None, 1e-5)
    kernel = milliseconds(lambda: norm_kernel.scale_and_shift_gradients(x, g, mean[..., 0], rstd[..., 0]))
    plain = milliseconds(lambda: ((g * ((x - mean) * rstd)).sum(1), g.sum(1)))
    print(f"us, layer norm float32 128x128x768: kernel {1e3 * kernel:.0f}, plain {1e3 * plain:.0f}", flush=True)


def check_broken() -> None:
    """A broken sample has a norm that is not finite, adds nothing, and touches no other."""
    for dtype in (BF16, FP32):
        for value in (float("nan"), float("inf"), 1e30):
            products = pair(dtype, 6, 16, 768, 768)
            products.rows[2, 3, 700] = value
            norms = products.row_norms()
            rest = [0, 1, 3, 4, 5]
            others = OuterProducts(products.rows[rest], products.columns[rest])
            clipper = Clipper("flat", 1.0)
            found, wanted = (clipper.clip([[p]], 1.0).vector for p in (products, others))
            error = float((found - wanted).abs().max() / wanted.abs().max())
            report(f"broken {str(dtype)[6:]} {value}", error if int(norms.isfinite().sum()) == 5 else 1.0, 1e-6)


def check_cancelling() -> None:
    """A sample of huge tokens that cancel moves the sum by a small part of the bound at most."""
    for dtype in (BF16, FP32):
        calm = pair(dtype, 8, 2, 768, 768)
        big = pair(dtype, 1, 1, 768, 768)
        rows = torch.cat([torch.cat([big.rows, -big.rows], 1) * 1e5, calm.rows])
        columns = torch.cat([torch.cat([big.columns, big.columns], 1) * 1e5, calm.columns])
        clipper = Clipper("flat", 1.0)
        found, wanted = (clipper.clip([[p]], 1.0).vector for p in (OuterProducts(rows, columns), calm))
        report(f"cancelling {str(dtype)[6:]}", float((found - wanted).double().norm()), 1e-3)


def check_matrices() -> None:
    """Norms and weighted sums of matrices that are read where they are: ragged, sliced, with a broken row."""
    matrices = [torch.randn(10, n, device="cuda")[:7] for n in (3, 300, 1025, 1)]
    matrices.append(torch.randn(7, 40, device="cuda")[:, :17])
    matrices[1][2, 5] = float("nan")
    factors = torch.rand(7, device="cuda")
    factors[2] = 0.0
    together = ragged_kernel.Matrices(matrices)
    squares, total = together.square_sums(), together.weighted_sum(factors)
    rows = torch.stack([m.double().square().sum(1) for m in matrices], 1)
    sums = torch.cat([factors.double() @ m.double().nan_to_num(0.0) for m in matrices])
    same = torch.equal(squares.isfinite(), rows.isfinite())
    report("matrices, norms", float((squares / rows - 1)[rows.isfinite()].abs().max()) if same else 1.0, 1e-6)
    report("matrices, sums", float((total - sums).abs().max() / sums.abs().max()), 1e-6)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x).mean(1))


def clipped_sums(method: Method, perf: PerfConfig, autocast: bool, factored: bool) -> tuple[list[Tensor], int, int]:
    """Of five batches; how many weights were factored in the last; how many forwards were recorded."""
    torch.manual_seed(1)
    model = Encoder().cuda()
    engine = PrivacyEngine()
    _, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=32),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        method=method,
        perf=perf,
    )
    gradients: Any = optimizer.gradients
    is_faster, sums, kinds = outer.is_faster, [], 0
    outer.is_faster = is_faster if factored else (lambda x, outputs: False)
    try:
        for i in range(5):
            x = torch.randn(32, 16, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(i))
            with torch.autocast("cuda", dtype=BF16, enabled=autocast):
                loss = model(x).float().square().sum(1).mean()
            loss.backward()
            kinds = sum(isinstance(parts[0], OuterProducts) for parts in gradients.recorder.per_sample())
            gradients.collect(None)
            sums.append(gradients.sum.vector.clone())
            gradients.forget_sum()
    finally:
        outer.is_faster = is_faster
    fast = engine._attached.fast
    recorded = 0 if fast is None else fast._graphed.recorded
    engine.detach()
    return sums, kinds, recorded


def check_engine(method: Method, autocast: bool, tolerance: float) -> None:
    plain, none, _ = clipped_sums(method, PerfConfig(), autocast, factored=False)
    eager, eager_kinds, _ = clipped_sums(method, PerfConfig(), autocast, factored=True)
    graphs, graph_kinds, recorded = clipped_sums(method, PerfConfig(cuda_graphs=True), autocast, factored=True)
    label = f"{method} {'bf16' if autocast else 'fp32'}"
    more = f", {eager_kinds} weights factored, {recorded} recorded"
    if (none, eager_kinds, graph_kinds, recorded) != (0, 8, 8, 1):
        FAILED.append(f"{label}: {none}, {eager_kinds}, {graph_kinds} factored, {recorded} recorded")
    for name, other, wanted, most in (
        ("factored", eager, plain, tolerance),
        ("graphs", graphs, eager, 1e-5 if not autocast else 1e-3),
    ):
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(other, wanted, strict=True))
        report(f"engine {label} {name}", error, most, more)


def check_refresh() -> None:
    """Of RoBERTa-base's weights: recorded, on streams side by side, as plainly; then its time."""
    shapes = [*[(768, 768)] * 49, *[(3072, 768)] * 12, *[(768, 3072)] * 12, (2, 768)]
    weights = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    recorded, plain = (refresh_of(weights, cuda_graph=cuda_graph) for cuda_graph in (True, False))
    for step in range(4):
        found, wanted = (run(step) for run in (recorded, plain))
        error = max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, wanted, strict=True))
        report(f"refresh, step {step}", error, 0.0)
        with torch.no_grad():
            torch._foreach_mul_(weights, 1.0 + 0.1 * torch.rand((), device="cuda"))
            weights[step].normal_()
    print(f"ms, refresh: recorded {milliseconds(lambda: recorded(0)):.2f}, plain {milliseconds(lambda: plain(0)):.2f}")


def refresh_of(weights: list[nn.Parameter], *, cuda_graph: bool) -> Callable[[int], list[Tensor]]:
    """A refresh of its own generator, as a function that returns factors and masks."""
    slots = [Slot(str(i), weight, Layout(transposed=True)) for i, weight in enumerate(weights)]
    generator = torch.Generator("cuda").manual_seed(0)
    refresh = Refresh(make_stacks(slots), slots, LSG(rank=8, sparsity=0.5), generator, cuda_graph=cuda_graph)

    def run(step: int) -> list[Tensor]:
        refresh(step)
        spaces = [slot.subspace for slot in slots if slot.subspace is not None]
        masks = [kept.place for space in spaces for kept in (space.left_kept, space.right_kept) if kept is not None]
        return [factor for space in spaces for factor in (space.left, space.right)] + masks

    return run


def milliseconds(run: Callable[[], Any]) -> float:
    times = []
    for i in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def time_products(dtype: torch.dtype, m: int, n: int) -> None:
    """B=256, T=16; the explicit way is that of `_Linear.backward` and the clipper."""
    factors = torch.rand(256, device="cuda")
    times: dict[str, float] = {}
    for masked in BOTH:
        products = pair(dtype, 256, 16, m, n, masked)
        name = "masked " if masked else ""
        times[f"{name}norms"] = milliseconds(products.row_norms)
        times[f"{name}sum"] = milliseconds(lambda p=products: p.weighted_sum(factors))

    def explicitly() -> Tensor:
        block = (products.rows.mT @ products.columns).float().flatten(1)
        ragged_reference.row_norms(block)
        return factors @ block.masked_fill((factors == 0).unsqueeze(1), 0.0)

    times["explicit norms and sum"] = milliseconds(explicitly)
    torch.cuda.empty_cache()
    text = ", ".join(f"{name} {1e3 * value:.0f}" for name, value in times.items())
    print(f"us, {str(dtype)[6:]} {m}x{n}, B=256, T=16: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
