"""`lsg budget`: three of ε, noise multiplier, epochs and batch size in, the fourth out, with what it means."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lsg.accounting.budget import Budget, plan_budget, safe_delta
from lsg.accounting.epsilon import ACCOUNTANTS
from lsg.accounting.rounding import epsilon_text
from lsg.errors import ConfigurationError
from lsg.files.terminal import Terminal
from lsg.tasks.names import KINDS, TRAIN_IMAGES, check_task
from lsg.train.choose import recipe_for, told
from lsg.train.config import RECIPES
from lsg.train.presets import preset

# Training records of each public task; batch size, epochs and δ are those that `lsg train` uses.
RECORDS = {
    "sst2": 67_349,
    "qnli": 104_743,
    "qqp": 363_846,
    "mnli": 392_702,
    "cifar10": 50_000,
    "fashion-mnist": 60_000,
    "digits": TRAIN_IMAGES,
}
PLOT_POINTS, PLOT_HEIGHT, COLUMN_WIDTH = 20, 8, 3
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def budget(
    records: Annotated[
        int | None,
        typer.Option(help="N, the number of training records, or of persons; of a public --task, known."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help=f"Start from what lsg train would take for a task: {', '.join(KINDS)}.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="With --task, auto or paper, as in lsg train.")] = "auto",
    epsilon: Annotated[float | None, typer.Option(help="The budget ε.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise / clipping threshold.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the records.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Expected size of a Poisson batch.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Below 1/N; default: the task's, else 1/(10 N) down to a power of ten.")
    ] = None,
    accountant: Annotated[str, typer.Option(help="prv, pld or rdp: decides; the others are shown.")] = "prv",
    plot: Annotated[Path | None, typer.Option(help="Also draw ε over training into this .png or .svg file.")] = None,
) -> None:
    """Plan a privacy budget: of ε, noise multiplier, epochs and batch size give three, and get the fourth."""
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise ConfigurationError(f"--plot {plot}: the name must end in .png or .svg")
    given: dict[str, Any] = {
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "epochs": epochs,
        "batch_size": batch_size,
    }
    if recipe not in RECIPES:
        raise ConfigurationError(f"--recipe '{recipe}' must be one of {', '.join(RECIPES)}")
    if task is not None:
        check_task(task)
        records = RECORDS.get(task) if records is None else records
    if records is None:
        raise ConfigurationError(
            f"--records is missing: the number of training records, or one of --task {', '.join(RECORDS)}"
        )
    text = ""
    if task is not None:
        usual, text = _usual(task, recipe, records, epsilon, delta, given)
        delta = usual["delta"] if delta is None else delta
        _fill(given, usual)
    if delta is None:
        delta = safe_delta(max(records, 1))
    found = next((name for name, value in given.items() if value is None), "")
    plan = plan_budget(records=records, delta=delta, accountant=accountant, **given)
    console = Terminal()
    if text:
        console.lines(text)
    console.print(_plan_table(plan, found))
    trajectory = plan.over_training(PLOT_POINTS)
    console.print(_trajectory_table(plan, trajectory))
    points = [(steps / plan.steps * plan.epochs, spent) for steps, spent in trajectory]
    console.print(terminal_plot(points))
    console.print(_trade_off_table(plan))
    if plot is not None:
        from lsg.report.budget_figure import save_epsilon_figure  # matplotlib takes a second, which --help need not

        save_epsilon_figure(plot, points, title=_summary(plan))
        console.print(f"Wrote {plot}", soft_wrap=True)


def _usual(
    task: str, recipe: str, records: int, epsilon: float | None, delta: float | None, given: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """What `lsg train` takes where nothing is given (batch size, epochs, δ), and the recipe with what is given."""
    kept = {name: value for name, value in given.items() if value is not None}
    if recipe == "paper":
        return preset(task, "lsg"), ""
    chosen = recipe_for(task, records, epsilon, delta)
    usual = {name: getattr(chosen, name) for name in ("batch_size", "epochs", "delta")}
    return usual, told(replace(chosen, **{name: kept[name] for name in usual.keys() & kept}), kept)


def _fill(given: dict[str, Any], usual: dict[str, Any]) -> None:
    """The task's batch and epochs where nothing else is given. With ε and σ both given, one of them is the unknown."""
    both = given["epsilon"] is not None and given["noise_multiplier"] is not None
    if given["batch_size"] is None and not (both and given["epochs"] is not None):
        given["batch_size"] = usual["batch_size"]
    if given["epochs"] is None and not both:
        given["epochs"] = usual["epochs"]


def _summary(plan: Budget) -> str:
    return (
        f"ε = {epsilon_text(plan.epsilon)} at δ = {plan.delta:g}: noise multiplier {_noise_text(plan)}, "
        f"{plan.epochs} epochs, batch {plan.batch_size:,} of {plan.records:,}"
    )


def _plan_table(plan: Budget, found: str) -> Table:
    rows = {
        "records": ("records N", f"{plan.records:,}"),
        "batch_size": ("expected batch size B", f"{plan.batch_size:,}"),
        "rate": ("sample rate q = B/N", f"{plan.sampling.sample_rate:.4g}"),
        "epochs": ("epochs", f"{plan.epochs:,}"),
        "steps": ("steps", f"{plan.steps:,}"),
        "delta": ("δ", f"{plan.delta:g}"),
        "noise_multiplier": ("noise multiplier", _noise_text(plan)),
    }
    table = Table(
        title="Privacy budget",
        caption="Neighbours: one record added or removed. Batches: Poisson samples.",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, (label, value) in rows.items():
        mark = "computed" if name == found else ""
        table.add_row(label, value, mark, style="bold green" if mark else None)
    table.add_section()
    for name in ACCOUNTANTS:
        decides = name == plan.accountant
        mark = ("computed" if found == "epsilon" else "decides") if decides else ""
        table.add_row(
            f"ε by {name}", epsilon_text(plan.epsilon_by(name)), mark, style="bold green" if decides else None
        )
    return table


def _trajectory_table(plan: Budget, trajectory: list[tuple[int, float]]) -> Table:
    table = Table(title=f"ε over training, by {plan.accountant}")
    for column in ("of training", "epochs", "steps", "ε so far", "of the budget"):
        table.add_column(column, justify="right")
    every = max(1, len(trajectory) // 10)
    for steps, spent in trajectory[every - 1 :: every]:
        share = steps / plan.steps
        table.add_row(
            f"{share:.0%}",
            f"{share * plan.epochs:.1f}",
            f"{steps:,}",
            epsilon_text(spent),
            f"{spent / plan.epsilon:.0%}" if plan.epsilon else "-",
        )
    return table


def _trade_off_table(plan: Budget) -> Table:
    table = Table(
        title=f"The same ε = {epsilon_text(plan.epsilon)} in {plan.epochs} epochs with other batches",
        caption="noise/B: on the averaged gradient, in units of the clipping threshold. Less is better.",
    )
    for column in ("batch size B", "steps", "noise multiplier", "noise/B", "against this plan"):
        table.add_column(column, justify="right")
    for factor in (0.25, 0.5, 1, 2, 4):
        size = round(plan.batch_size * factor)
        if not 1 <= size <= plan.records:
            continue
        try:
            other = plan if factor == 1 else plan.with_batch(size)
        except ConfigurationError:  # an ε at the edge of what the accountant can tell
            continue
        noise = other.noise_multiplier / size
        table.add_row(
            f"{size:,}",
            f"{other.steps:,}",
            _noise_text(other),
            f"{noise:.3e}",
            f"{noise * plan.batch_size / plan.noise_multiplier:.2f}x",
            style="bold green" if factor == 1 else None,
        )
    return table


def terminal_plot(points: list[tuple[float, float]]) -> Text:
    """ε over epochs as columns of blocks, with axes."""
    top = max(spent for _, spent in points) or 1.0  # an ε too small to tell from 0
    margin = len(epsilon_text(top))
    lines = []
    for row in range(PLOT_HEIGHT, 0, -1):
        levels = [spent / top * PLOT_HEIGHT - (row - 1) for _, spent in points]
        blocks = "".join(_EIGHTHS[round(8 * min(max(x, 0), 1))] * (COLUMN_WIDTH - 1) + " " for x in levels)
        label = epsilon_text(top * row / PLOT_HEIGHT) if row % 4 == 0 else ""
        lines.append(f"{label:>{margin}} ┤{blocks}")
    last = f"{points[-1][0]:g} epochs"
    width = COLUMN_WIDTH * len(points)
    lines.append(f"{'0.00':>{margin}} ┼{'─' * width}")
    lines.append(f"{'ε':>{margin}}  {'0':<{max(1, width - len(last))}}{last}")
    return Text("\n".join(lines), no_wrap=True)


def _noise_text(plan: Budget) -> str:
    """Rounded up, so that typing it again spends no more."""
    return f"{math.ceil(1e4 * plan.noise_multiplier - 1e-6) / 1e4:.4f}"
