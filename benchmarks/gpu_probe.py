"""Run on a GPU machine: checks the fused kernel against its reference and shows where a step's time goes."""

import sys
import time
from typing import Any

import torch

from lsg.bench.contenders import Setting, non_private, private
from lsg.bench.presets import workload
from lsg.bench.shapes import preset
from lsg.kernels import factor_kernel as kernels
from lsg.kernels.factor_gradient import reference_factor_gradients
from lsg.methods import LSG
from lsg.perf import PerfConfig


def check_and_time_kernel() -> None:
    """Against float64, and against what it replaces: the plain products, and a weight gradient."""
    torch.set_float32_matmul_precision("high")
    for dtype in (torch.bfloat16, torch.float32):
        for i, o in ((768, 768), (768, 3072)):
            x, g = (torch.randn(128, 128, n, device="cuda", dtype=dtype) for n in (i, o))
            row, column = (torch.linalg.qr(torch.randn(n, 8, device="cuda")).Q.to(dtype) for n in (o, i))
            rows, columns = _half(o), _half(i)
            arguments = (x, g, row, column.T)
            reference = reference_factor_gradients(*(t.double() for t in arguments), rows[0], columns[0])
            found = kernels.factor_gradients(*arguments, rows[1], columns[1], o // 2, i // 2)
            plain = reference_factor_gradients(*arguments, rows[0], columns[0])
            errors = [max(_error(a, b) for a, b in zip(f, reference, strict=True)) for f in (found, plain)]
            times = [
                median_ms(
                    lambda a=arguments, r=rows, c=columns, o=o, i=i: kernels.factor_gradients(
                        *a, r[1], c[1], o // 2, i // 2
                    )
                ),
                median_ms(lambda a=arguments, r=rows, c=columns: reference_factor_gradients(*a, r[0], c[0])),
                median_ms(lambda x=x, g=g: g.flatten(0, 1).T @ x.flatten(0, 1)),
            ]
            print(
                f"kernel {dtype} {i}x{o}: error {errors[0]:.1e} (plain {errors[1]:.1e}); us: "
                f"kernel {times[0] * 1e3:.0f}, plain {times[1] * 1e3:.0f}, full weight gradient {times[2] * 1e3:.0f}",
                flush=True,
            )


def _half(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    kept = torch.randperm(size, device="cuda")[: size // 2].sort().values
    place = torch.full((size,), -1, device="cuda", dtype=torch.int32)
    place[kept] = torch.arange(len(kept), device="cuda", dtype=torch.int32)
    return kept, place


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def median_ms(run: Any) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=20, rep=60, return_mode="median"))


def clock(run: Any, repeats: int = 5) -> float:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def profile_step(label: str, step: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    events = recorded.key_averages()
    kernels_ms = sum(e.self_device_time_total for e in events) / 1e3
    print(f"--- {label}: kernels {kernels_ms:.1f} ms a step", flush=True)
    for e in sorted(events, key=lambda e: -e.self_device_time_total)[:16]:
        print(f"  {e.self_device_time_total / 1e3:8.2f} ms {e.count:5d} x {e.key[:90]}")


def main(precision: str, name: str) -> None:
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    check_and_time_kernel()
    chosen = preset(name).scaled(micro_batches=2)
    setting = Setting(chosen, workload(chosen, torch.device("cuda")), torch.device("cuda"), precision)
    lsg = LSG(rank=chosen.rank, sparsity=chosen.sparsity)
    builders = {
        "non-private": lambda: non_private(setting, compiled=False),
        "lsg": lambda: private(setting, lsg),
        "non-private compiled": lambda: non_private(setting, compiled=True),
        "lsg compiled": lambda: private(setting, lsg, PerfConfig(compile=True)),
    }
    for label, build in builders.items():
        start = time.perf_counter()
        step = build()
        step()
        torch.cuda.synchronize()
        print(f"{label}: first step {time.perf_counter() - start:.1f} s; {clock(step):.1f} ms a step", flush=True)
        profile_step(label, step)
        engine = getattr(step, "engine", None)
        if engine is not None:
            recorder = engine._recorder

            def fresh(recorder: Any = recorder) -> None:
                recorder.subspaces._made_from = None
                recorder.ready()

            print(f"{label}: refresh {clock(fresh):.2f} ms", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:3])
