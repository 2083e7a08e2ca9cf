"""The plot of a bench run: bars of throughput, or a line for each contender over a sweep."""

from pathlib import Path
from statistics import median
from typing import Any

from lsg.extras import needs_extra
from lsg.report.figures import save_figure

with needs_extra("train", "a figure"):
    from matplotlib.figure import Figure


def plot_bench(document: dict[str, Any], swept: str, path: Path) -> None:
    """`swept` is the preset's field that varies, empty for a single point."""
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axis = figure.subplots()
    points = document["points"]
    rows = [
        {t["name"]: t["samples"] / median(t["seconds"]) for t in p["timings"] if t["error"] is None} for p in points
    ]
    if swept:
        for name in rows[0]:
            axis.plot([p["preset"][swept] for p in points], [row[name] for row in rows], marker="o", label=name)
        axis.set_xlabel(swept)
        axis.set_ylabel("samples per second")
        axis.set_ylim(bottom=0)
        axis.legend()
    else:
        names = list(rows[0])
        colours = ["#888888" if n.startswith("non") else "#1f77b4" if n.startswith("lsg") else "#d9a441" for n in names]
        axis.barh(names[::-1], [rows[0][n] for n in names][::-1], color=colours[::-1])
        axis.set_xlabel("samples per second")
        best = points[0]["best_non_private"]
        if best is not None:
            axis.axvline(rows[0][best], color="#888888", linestyle="--", linewidth=1)  # what ratios are against
    axis.set_title(f"{points[0]['preset']['name']}, {document['precision']}, {document['device']}")
    save_figure(figure, path)
