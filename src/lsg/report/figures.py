"""Charts of the demo: accuracies and times in, a PNG out. Drawn without a display and without pyplot's global state."""

from collections.abc import Mapping
from pathlib import Path

from lsg.extras import needs_extra
from lsg.files.atomic import atomic_path

with needs_extra("train", "a figure"):
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers too. References are grey and dashed.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
REFERENCE = "#7F7F7F"
INK = "#333333"


def save_demo_figure(
    path: Path,
    scores: Mapping[str, Mapping[str, tuple[float, float]]],
    milliseconds: Mapping[str, float],
    *,
    titles: tuple[str, str, str],
) -> None:
    """Accuracy by method and budget, beside the time of a record in a wide network, if there is any.

    scores: method -> budget -> accuracy as a fraction, and its standard error. titles: of the whole, left and right.
    """
    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    figure.suptitle(titles[0], fontsize=12, fontweight="bold", color=INK)
    panels = figure.subplots(1, 2 if milliseconds else 1, width_ratios=(3, 2) if milliseconds else None, squeeze=False)
    _draw_scores(panels[0][0], scores)
    panels[0][0].set_title(titles[1], fontsize=10, loc="left", color=INK)
    if milliseconds:
        _draw_times(panels[0][1], milliseconds)
        panels[0][1].set_title(titles[2], fontsize=10, loc="left", color=INK)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path, *, secret: bool = False) -> None:
    """As the kind of file that the path's ending names, whole or not at all. secret: only its owner may read it."""
    kind = path.suffix.removeprefix(".")
    # The same figure is the same file: no date, and no random names inside.
    with atomic_path(path, secret=secret) as partial, rc_context({"svg.hashsalt": "lsg"}):
        figure.savefig(partial, format=kind, metadata={"Date": None} if kind == "svg" else None)


def _draw_scores(axes: Axes, scores: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """A group of bars a method, a colour a budget."""
    budgets = list(dict.fromkeys(budget for found in scores.values() for budget in found))
    for number, budget in enumerate(budgets):
        places, values, errors = [], [], []
        for row, found in enumerate(scores.values()):
            if budget in found:
                own = list(found).index(budget) - (len(found) - 1) / 2  # around the middle of its group
                places.append(row + 0.36 * own)
                values.append(100 * found[budget][0])
                errors.append(100 * found[budget][1])
        bars = axes.barh(
            places,
            values,
            xerr=errors,
            height=0.34,
            color=COLOURS[number % len(COLOURS)],
            label=budget,
            error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 3},
        )
        axes.bar_label(bars, labels=[f"{value:.1f}" for value in values], padding=5, color=INK, fontsize=9)
    axes.set_yticks(range(len(scores)), list(scores))
    axes.set(xlabel="Test accuracy (%)", xlim=(0, 118))
    axes.set_xticks(range(0, 101, 20))
    axes.spines["bottom"].set_bounds(0, 100)
    axes.legend(loc="lower left", frameon=True)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    clean(axes, grid="x")


def _draw_times(axes: Axes, milliseconds: Mapping[str, float]) -> None:
    bars = axes.barh(list(milliseconds), list(milliseconds.values()), color=REFERENCE, height=0.6)
    axes.bar_label(bars, labels=[f"{value:.1f}" for value in milliseconds.values()], padding=5, color=INK, fontsize=9)
    axes.set(xlabel="Milliseconds a record", xlim=(0, 1.18 * max(milliseconds.values())))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    clean(axes, grid="x")


def clean(axes: Axes, *, grid: str) -> None:
    """Frameless, with a light grid along one axis ("x" or "y")."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if grid == "x":
        axes.xaxis.grid(True, color="#E3E3E3", linewidth=0.8)
    else:
        axes.yaxis.grid(True, color="#E3E3E3", linewidth=0.8)
