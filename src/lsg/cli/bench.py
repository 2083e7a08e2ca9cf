"""`lsg bench`: how fast private training is, next to what one would use instead."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lsg.bench.shapes import PRESETS, Preset, preset
from lsg.errors import ConfigurationError, PrivacyError
from lsg.files.atomic import make_folder, write_atomic
from lsg.files.foreign_text import to_json
from lsg.files.terminal import Terminal
from lsg.methods import make_method
from lsg.perf import PerfConfig
from lsg.train.provenance import provenance

if TYPE_CHECKING:
    import torch

    from lsg.bench.timing import Timing

SWEEPS = {
    "batch": ("micro_batch", (4, 8, 16, 32)),
    "length": ("tokens", (16, 32, 64, 128)),
    "width": ("width", (128, 256, 512, 1024)),
    "rank": ("rank", (2, 4, 8, 16)),
    "sparsity": ("sparsity", (0.0, 0.3, 0.5, 0.9)),
}


def bench(
    name: Annotated[str, typer.Option("--preset", help="One of " + ", ".join(PRESETS))] = "cpu-encoder",
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16 (autocast); default: the weights'")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; default: cuda where there is one")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each contender")] = 10,
    only: Annotated[str, typer.Option(help="Comma-separated contenders; default: all")] = "",
    sweep: Annotated[str, typer.Option(help="Instead: vary one of " + ", ".join(SWEEPS))] = "",
    output: Annotated[Path, typer.Option(help="Folder for the JSON file and the plot")] = Path("runs/bench"),
) -> None:
    """Time non-private training, LSG, RGP, DPSGD, Opacus, LoRA with Opacus and fastDP, interleaved.

    All have the same model, batch and precision. Ratios are against the best non-private training of those that ran.
    """
    chosen = preset(name)
    precision = chosen.precision(precision)
    if sweep and sweep not in SWEEPS:
        raise ConfigurationError(f"sweep '{sweep}' is unknown; choose from {', '.join(SWEEPS)}")
    from lsg.bench.timing import best_non_private  # with PyTorch, for which help and errors of usage need not wait
    from lsg.train.precision import choose_device

    console = Terminal()
    place = choose_device(device or "auto")
    make_folder(output)  # before the work: one that cannot be made costs none
    field, values = SWEEPS[sweep] if sweep else ("rank", (chosen.rank,))
    points = []
    for value in values:
        point = chosen.scaled(**{field: value})
        checks = _check(point, precision, place, only, console) if not sweep else {}
        timings = _run(point, precision, place, rounds, only or ("non-private,lsg" if sweep else ""), console)
        best = best_non_private(timings)
        points.append(
            {
                "preset": asdict(point),
                "checks": checks,
                "best_non_private": None if best is None else best.name,
                "timings": [asdict(t) for t in timings],
            }
        )
        console.print(_table(point, precision, place, timings))
    stem = f"{name}-{precision}-{place.type}" + (f"-{sweep}" if sweep else "")
    document = {"provenance": provenance(), "precision": precision, "device": place.type, "points": points}
    write_atomic(output / f"{stem}.json", to_json(document, indent=1) + "\n")
    from lsg.bench.plot import plot_bench

    plot_bench(document, sweep and field, output / f"{stem}.png")
    console.print(f"written: {output / stem}.json, {output / stem}.png")


def _check(point: Preset, precision: str, device: torch.device, only: str, console: Terminal) -> dict[str, float]:
    """Each fast path in this bench -> how far its gradients are from the plain path's. Too far ends the bench."""
    from lsg.bench.checking import TOLERANCE, difference
    from lsg.bench.contenders import FAST, contenders
    from lsg.bench.presets import workload
    from lsg.bench.setting import Setting

    setting = Setting(point, workload(point, device), device, precision)
    wanted = [part.strip() for part in only.split(",")] if only else list(contenders(setting))
    paths = {"lsg": PerfConfig(), **FAST}
    lsg = make_method("lsg", rank=point.rank, sparsity=point.sparsity)
    checks = {}
    for name in (name for name in wanted if name in paths):
        checks[name] = difference(setting, lsg, paths[name])
        console.print(f"{name}: gradients differ from the plain path's by {checks[name]:.1e} of their size")
        if not checks[name] <= TOLERANCE[precision]:
            raise PrivacyError(
                f"{name}: its gradients differ from the plain path's by {checks[name]:.1e} of their size"
            )
    return checks


def _run(
    point: Preset, precision: str, device: torch.device, rounds: int, only: str, console: Terminal
) -> list[Timing]:
    from lsg.bench.contenders import contenders, left_out
    from lsg.bench.presets import workload
    from lsg.bench.setting import Setting
    from lsg.bench.timing import measure

    setting = Setting(point, workload(point, device), device, precision)
    builders, missing = contenders(setting), left_out(setting)
    wanted = [part.strip() for part in only.split(",")] if only else list(builders)
    for part in wanted:
        if part in missing:
            raise ConfigurationError(f"contender '{part}' needs the package {missing[part]}, which is not installed")
        if part not in builders:
            raise ConfigurationError(f"contender '{part}' is unknown; choose from {', '.join(builders)}")
    for part, package in missing.items() if not only else ():
        console.print(f"{part}: package {package} is not installed: left out")
    picked = {part: builders[part] for part in wanted}
    return measure(picked, samples=setting.workload.samples, rounds=rounds, device=device, report=console.print)


def _table(point: Preset, precision: str, device: torch.device, timings: list[Timing]) -> Table:
    from lsg.bench.timing import best_non_private

    title = f"{point.name} on {device.type}, {precision}: {point.micro_batches} x {point.micro_batch} samples a step"
    table = Table(title=title)
    best = best_non_private(timings)
    against = "of non-private" if best is None else f"of the best non-private ({_way(best)})"
    for column in ("contender", "samples/s", against, "peak GiB", "first step s"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for t in timings:
        if t.error is not None:
            table.add_row(t.name, "-", t.error[:60], "", "")
            continue
        ratio = "-" if best is None else f"{best.median / t.median:.2f}"
        peak = "-" if t.peak_bytes is None else f"{t.peak_bytes / 2**30:.2f}"
        table.add_row(t.name, f"{t.samples_per_second:.1f}", ratio, peak, f"{t.first_seconds:.1f}")
    return table


def _way(non_private: Timing) -> str:
    """How it runs, as a reader of the table calls it."""
    return non_private.name.removeprefix("non-private").strip() or "eager"
