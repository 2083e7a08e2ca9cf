"""The figure of an audit: what the adversary saw under both hypotheses. Not private, if the data are not canaries."""

from pathlib import Path

import numpy as np

from lsg.audit.exposure import BY_CHANCE
from lsg.audit.planted_secrets import Exposed
from lsg.audit.report import Audit
from lsg.extras import needs_extra
from lsg.report.figures import COLOURS, INK, clean, save_figure

with needs_extra("train", "a figure"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save_audit_figure(path: Path, audit: Audit, *, title: str) -> None:
    """One panel for the strongest canary of each white-box audit, one for the guesses of a one-run audit."""
    panels = len(audit.white_box) + (audit.one_run is not None)
    figure = Figure(figsize=(4.8 * panels, 3.8), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
    axes = iter(np.atleast_1d(figure.subplots(1, panels)))
    for part in audit.white_box:
        strongest = max(part.observed, key=lambda o: o.bounds.epsilon)
        name = "Log-likelihood ratio" if part.mechanism.steps > 1 else "Along the canary, over the noise's deviation"
        _two_sides(
            next(axes),
            {"canary absent": strongest.absent, "canary present": strongest.present},
            title=f"White box, canary {strongest.canary}\nε claimed {part.claimed:.2f}, at least {part.bound:.2f}",
            label=name,
        )
    if audit.one_run is not None:
        run = audit.one_run
        _two_sides(
            next(axes),
            {"left out of training": run.scores[~run.was_in], "trained on": run.scores[run.was_in]},
            title=f"One run, {run.correct} of {run.guesses} guesses right\n"
            f"ε claimed {run.claimed:.2f}, at least {run.bound:.2f}",
            label="How far the canary's loss fell",
        )
    save_figure(figure, path)


def _two_sides(axes: Axes, sides: dict[str, np.ndarray], *, title: str, label: str) -> None:
    edges = np.histogram_bin_edges(np.concatenate(list(sides.values())), bins=40)
    for (name, values), colour in zip(sides.items(), COLOURS, strict=False):
        axes.hist(values, bins=list(edges), density=True, alpha=0.55, color=colour, label=name)
    axes.set(xlabel=label, ylabel="Density")
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.legend(frameon=False, fontsize=8)
    clean(axes, grid="y")


def save_exposure_figure(path: Path, found: list[Exposed], *, title: str) -> None:
    """How many bits of each secret each model exposes, the most exposed first, and what chance shows on average."""
    figure = Figure(figsize=(6.0, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    for one, colour in zip(found, COLOURS, strict=False):
        bits = one.bits.sort(descending=True).values
        axes.plot(range(1, len(bits) + 1), bits.tolist(), color=colour, label=f"{one.model}: {one.mean:.1f} on average")
    axes.axhline(BY_CHANCE, color=INK, linewidth=0.8, linestyle=":", label=f"chance: {BY_CHANCE:.1f} on average")
    axes.set(xlabel="Secrets, the most exposed first", ylabel="Exposure, bits")
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.legend(frameon=False, fontsize=8)
    clean(axes, grid="y")
    save_figure(figure, path, secret=True)
