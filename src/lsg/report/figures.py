"""Charts of training runs: accuracy curves in, a PNG out. Drawn without a display and without pyplot's global state."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lsg.extras import needs_extra
from lsg.files.atomic import atomic_path

with needs_extra("train", "a figure"):
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

# Okabe and Ito's palette, told apart by colour-blind readers too. References are grey and dashed.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
REFERENCE = "#7F7F7F"
INK = "#333333"


def save_accuracy_figure(
    path: Path,
    curves: Mapping[str, Sequence[float]],
    *,
    errors: Mapping[str, float],
    title: str,
    references: Sequence[str] = (),
) -> None:
    """Accuracy over epochs beside bars of the final accuracy.

    curves: label -> accuracy, as a fraction, after each epoch. errors: label -> standard error of the last one.
    references: labels drawn as yardsticks rather than contenders.
    """
    contenders = [label for label in curves if label not in references]
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(contenders)}
    colours |= {label: REFERENCE for label in references}
    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
    _draw_curves(left, curves, colours, references)
    _draw_bars(right, {label: curve[-1] for label, curve in curves.items()}, errors, colours)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """As the kind of file that the path's ending names, whole or not at all."""
    kind = path.suffix.removeprefix(".")
    # The same figure is the same file: no date, and no random names inside.
    with atomic_path(path) as partial, rc_context({"svg.hashsalt": "lsg"}):
        figure.savefig(partial, format=kind, metadata={"Date": None} if kind == "svg" else None)


def _draw_curves(
    axes: Axes, curves: Mapping[str, Sequence[float]], colours: Mapping[str, str], references: Sequence[str]
) -> None:
    for label, curve in curves.items():
        style = "--" if label in references else "-"
        epochs, percent = range(1, len(curve) + 1), [100 * value for value in curve]
        marker = "o" if len(curve) == 1 else None  # a line of one point would be invisible
        axes.plot(epochs, percent, style, color=colours[label], linewidth=2, label=label, marker=marker)
    axes.set(xlabel="Epoch", ylabel="Test accuracy (%)", ylim=(0, 102))
    axes.set_title("Over training", fontsize=10, loc="left", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right", frameon=False)
    clean(axes, grid="y")


def _draw_bars(axes: Axes, final: Mapping[str, float], errors: Mapping[str, float], colours: Mapping[str, str]) -> None:
    labels = list(final)
    percent = [100 * final[label] for label in labels]
    bars = axes.barh(
        labels,
        percent,
        xerr=[100 * errors[label] for label in labels],
        color=[colours[label] for label in labels],
        error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 3},
        height=0.65,
    )
    axes.bar_label(bars, labels=[f"{value:.1f}" for value in percent], padding=5, color=INK, fontsize=10)
    axes.set(xlabel="Test accuracy (%)", xlim=(0, 118))
    axes.set_xticks(range(0, 101, 20))
    axes.spines["bottom"].set_bounds(0, 100)
    axes.set_title("After the last epoch (± standard error)", fontsize=10, loc="left", color=INK)
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
