"""ε over training: points in, a PNG or SVG out. Drawn without a display and without pyplot's global state."""

from collections.abc import Sequence
from pathlib import Path

from lsg.extras import needs_extra
from lsg.report.figures import save_figure

with needs_extra("train", "a figure"):
    from matplotlib.figure import Figure


def save_epsilon_figure(path: Path, points: Sequence[tuple[float, float]], *, title: str) -> None:
    """points: (epochs, ε spent by then)."""
    figure = Figure(figsize=(7, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    epochs, spent = zip(*points, strict=True)
    axes.plot(epochs, spent, color="#0072B2", linewidth=2, marker="o", markersize=4)
    axes.set(xlabel="Epoch", ylabel="ε spent", xlim=(0, None), ylim=(0, None))
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#E3E3E3", linewidth=0.8)
    save_figure(figure, path)
