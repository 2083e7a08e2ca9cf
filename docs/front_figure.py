"""results/ in, README's figure and table out, and the long table in docs/performance.md. `render.py` writes them."""

import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsg.report.figures import save_figure

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "figures" / "front.png"
CPU_ENCODER, CPU_WRN = "cpu-encoder-fp32-cpu", "cpu-wrn-fp32-cpu"
# Of one H200, at the commit that docs/performance.md names.
GPU_BENCHES = {
    "encoder-bf16-cuda": "RoBERTa-base shape, bf16",
    "encoder-tf32-cuda": "RoBERTa-base shape, tf32",
    "wrn28-4-bf16-cuda": "WRN28-4, bf16",
    "wrn28-4-tf32-cuda": "WRN28-4, tf32",
    "llama-1b-bf16-cuda": "Llama shape of 1.2 billion numbers, bf16",
}
ACCURACY = ROOT / "results" / "reproduce" / "gpu-hour" / "figure-epsilon.csv"

# Contenders of the bench -> what a reader of the front page calls them.
SHOWN = {
    "non-private": "non-private",
    "lsg": "lsg",
    "dpsgd": "lsg's DPSGD",
    "opacus hooks": "Opacus, hooks",
    "opacus ghost": "Opacus, ghost",
}
# A row of the table: file, workload.
ROWS = (
    (CPU_ENCODER, "encoder, 4 layers of 384, 2 CPU cores"),
    (CPU_WRN, "WRN28-1, 2 CPU cores"),
    *((stem, f"{workload}, H200") for stem, workload in GPU_BENCHES.items()),
)


def timings(stem: str) -> dict[str, dict[str, Any]]:
    """The contenders of a file of `lsg bench`, by name."""
    document = json.loads((ROOT / "results" / "bench" / f"{stem}.json").read_text())
    return {t["name"]: t for t in document["points"][0]["timings"] if t["error"] is None}


def speed(timing: dict[str, Any]) -> float:
    """Samples per second."""
    return timing["samples"] / median(timing["seconds"])


def best(found: dict[str, dict[str, Any]], start: str) -> float | None:
    """The highest speed among contenders whose names begin with `start`."""
    return max((speed(timing) for name, timing in found.items() if name.startswith(start)), default=None)


def table() -> str:
    """The speed of lsg with nothing set over that of others: above 1 it is faster."""
    lines = ["| model and machine | / eager non-private | / best non-private | / best Opacus |", "|---|---|---|---|"]
    for stem, workload in ROWS:
        found = timings(stem)
        ratios = [f"{speed(found['lsg']) / speed(found['non-private']):.2f}"]
        for start in ("non-private", "opacus"):
            other = best(found, start)
            ratios.append("not timed" if other is None else f"{speed(found['lsg']) / other:.2f}")
        lines.append(f"| {workload} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def all_contenders() -> str:
    """Every contender of the benches on a GPU."""
    lines = ["| workload | contender | samples/s | over best non-private | peak, GiB |", "|---|---|---|---|---|"]
    for stem, workload in GPU_BENCHES.items():
        found = timings(stem)
        plain = best(found, "non-private")
        assert plain is not None, stem
        for name, timing in sorted(found.items(), key=lambda item: -speed(item[1])):
            ratio, peak = speed(timing) / plain, timing["peak_bytes"] / 2**30
            lines.append(f"| {workload} | {name} | {speed(timing):,.0f} | {ratio:.2f} | {peak:.2f} |")
    return "\n".join(lines)


def scores() -> dict[str, list[tuple[float, float, float]]]:
    """Method -> (ε, accuracy, its standard deviation or 0) on SST-2; non-private training has no ε of its own."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    with ACCURACY.open() as file:
        for row in csv.DictReader(file):
            epsilon = float(row["target_epsilon"] or "inf")
            found.setdefault(row["method"], []).append(
                (epsilon, float(row["accuracy_mean"]), float(row["accuracy_std"] or 0))
            )
    return found


def draw(path: Path) -> None:
    """Two panels: speed, accuracy."""
    figure = Figure(figsize=(10, 3.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    found = timings(CPU_ENCODER)
    _bars(left, {label: speed(found[name]) for name, label in SHOWN.items()}, "{:,.1f}")
    left.set_title("Speed: samples per second", loc="left", fontsize=10)
    _accuracies(right)
    save_figure(figure, path)


def _bars(axes: Axes, values: dict[str, float], style: str) -> None:
    labels = list(values)[::-1]
    bars = axes.barh(labels, [values[label] for label in labels], color=[_colour(label) for label in labels])
    axes.bar_label(bars, [style.format(values[label]) for label in labels], padding=3, fontsize=8)
    axes.set_xlim(0, 1.15 * max(values.values()))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _colour(label: str) -> str:
    return "#888888" if label.startswith("non") else "#0072B2" if label.startswith("lsg") else "#E69F00"


def _accuracies(axes: Axes) -> None:
    found = scores()
    axes.axhline(found["non-private"][0][1], color="#888888", linestyle="--", label="non-private")
    for method, label, colour, shift in (("lsg", "LSG", "#0072B2", -0.06), ("dpsgd", "DPSGD", "#E69F00", 0.06)):
        points = sorted(found[method])
        axes.errorbar(
            [place + shift for place in range(len(points))],
            [accuracy for _, accuracy, _ in points],
            [spread for *_, spread in points],
            fmt="o",
            capsize=3,
            color=colour,
            label=label,
        )
        axes.set_xticks(range(len(points)), [f"ε = {epsilon:g}" for epsilon, *_ in points])
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylim(86, 95)
    axes.set_title("Accuracy: SST-2, %", loc="left", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
