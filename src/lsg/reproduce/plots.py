"""Figures of the paper's evaluation: summaries in, a PNG and an SVG out. Drawn without pyplot's global state."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lsg.extras import needs_extra
from lsg.report.figures import COLOURS, INK, REFERENCE, clean, save_figure
from lsg.reproduce.intensity import Intensity
from lsg.reproduce.store import Summary
from lsg.reproduce.tables import Panel

with needs_extra("train", "a figure"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

# Finer dashes for greater sparsity, as the paper's figure has it.
_DASHES = ((0, ()), (0, (6, 2)), (0, (3, 2)), (0, (1, 1.5)))


def save_epsilon_figure(
    stem: Path,
    panels: Mapping[str, Mapping[str, Mapping[float, Summary]]],
    references: Mapping[str, Summary | None],
    colours: Mapping[str, str],
) -> list[Path]:
    """Accuracy against epsilon. panels: title -> method -> epsilon -> summary. references: title -> non-private."""
    figure = Figure(figsize=(5.2 * min(len(panels), 2), 4.2 * -(-len(panels) // 2)), dpi=150, layout="constrained")
    grid = figure.subplots(-(-len(panels) // 2), min(len(panels), 2), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, methods) in zip(grid.flat, panels.items(), strict=False):
        for method, points in methods.items():
            epsilons = sorted(points)
            means = [points[epsilon].mean for epsilon in epsilons]
            spread = [points[epsilon].std or 0.0 for epsilon in epsilons]
            axes.errorbar(epsilons, means, spread, fmt="o-", color=colours[method], capsize=3, label=method)
        reference = references.get(title)
        if reference is not None:
            axes.axhline(reference.mean, color=REFERENCE, linestyle="--", label="N.P.")
        axes.set(xlabel="ε", ylabel="Accuracy (%)")
        axes.set_title(title, fontsize=10, loc="left", color=INK)
        _legend(axes)
        clean(axes, grid="y")
    return _save(figure, stem)


def save_curves_figure(stem: Path, title: str, curves: Mapping[tuple[int, float], Summary]) -> list[Path]:
    """Accuracy over epochs. curves: (rank, sparsity) -> summary. A colour for each rank, a line style a sparsity."""
    ranks = sorted({rank for rank, _ in curves})
    sparsities = sorted({sparsity for _, sparsity in curves})
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    for (rank, sparsity), summary in curves.items():
        axes.plot(
            range(1, len(summary.curve) + 1),
            summary.curve,
            color=COLOURS[ranks.index(rank) % len(COLOURS)],
            linestyle=_DASHES[sparsities.index(sparsity) % len(_DASHES)],
            marker="o" if len(summary.curve) == 1 else None,  # a line of one point would be invisible
            label=f"r={rank}, p={sparsity:g}" + (" (RGP)" if sparsity == 0 else ""),
        )
    axes.set(xlabel="Epoch", ylabel="Accuracy (%)")
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, columns=max(1, len(ranks)))
    clean(axes, grid="y")
    return _save(figure, stem)


def save_heat_map(stem: Path, panels: Sequence[Panel]) -> list[Path]:
    """Rank x sparsity, one row of maps a panel: ours and the paper's, each on its own colour scale."""
    figure = Figure(figsize=(10, 3.6 * len(panels)), dpi=150, layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False)
    for (left, right), panel in zip(grid, panels, strict=True):
        ours = [[entry.ours.mean if entry.ours else np.nan for entry in row] for row in panel.rows.values()]
        paper = [[np.nan if entry.paper is None else entry.paper for entry in row] for row in panel.rows.values()]
        for axes, values, title in ((left, ours, panel.title), (right, paper, "The paper")):
            _draw_map(axes, np.array(values), panel, title)
    return _save(figure, stem)


def save_intensity_figure(stem: Path, title: str, found: Intensity) -> list[Path]:
    """|W| and |∂W| of one layer: inputs run horizontally, outputs vertically, as in the paper."""
    figure = Figure(figsize=(11, 5.2), dpi=100, layout="constrained")
    figure.suptitle(f"{title}: {found.layer}", fontsize=11, color=INK)
    for axes, values, name in zip(figure.subplots(1, 2), (found.weight, found.gradient), ("|W|", "|∂W|"), strict=True):
        # A few extreme values would leave everything else black.
        image = axes.imshow(values, aspect="auto", cmap="magma", vmin=0, vmax=float(np.quantile(values, 0.995)) or 1.0)
        axes.set(xlabel="input", ylabel="output")
        axes.set_title(name, fontsize=10, loc="left", color=INK)
        figure.colorbar(image, ax=axes, extend="max")
    figure.supxlabel(found.observation, fontsize=8, color=INK)
    return _save(figure, stem)


def _draw_map(axes: Axes, values: np.ndarray, panel: Panel, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.set_xticks(range(len(panel.columns)), panel.columns)
    axes.set_yticks(range(len(panel.rows)), list(panel.rows))
    axes.set(xlabel="rank", ylabel="sparsity")
    if np.isnan(values).all():
        axes.set(xlim=(-0.5, len(panel.columns) - 0.5), ylim=(len(panel.rows) - 0.5, -0.5))
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color=INK)
        return
    image = axes.imshow(values, cmap="viridis", aspect="auto")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (row, column), value in np.ndenumerate(values):
        text, colour = ("-", INK) if np.isnan(value) else (f"{value:.1f}", "white" if value < middle else "black")
        axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.figure.colorbar(image, ax=axes, label="Accuracy (%)")


def _legend(axes: Axes, columns: int = 1) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False, fontsize=8, ncols=columns)
    else:
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color=INK)


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        save_figure(figure, path)
    return paths
