"""`lsg demo`: where low rank pays and where it does not, on digits: runs of `lsg train`, and steps of a wide network.

First all methods at the same ε, beside what `lsg train` chooses by itself and non-private training; each method has a
learning rate of its own (lsg.demo.settings says how it was found). Then the cost of a record in a wide network, beside
Opacus. The last lines say in words what the numbers of this run bear out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn
from rich.table import Table

from lsg.accounting.rounding import epsilon_text
from lsg.demo.settings import CONTENDERS, NETWORK, Settings, chosen
from lsg.errors import ConfigurationError
from lsg.files.atomic import write_atomic
from lsg.files.foreign_text import to_json
from lsg.files.terminal import Terminal, Words
from lsg.tasks.names import TEST_IMAGES, TRAIN_IMAGES
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.provenance import provenance

if TYPE_CHECKING:
    from lsg.demo.runs import DemoRun
    from lsg.demo.wide import Cost

DEFAULTS = Settings()


def demo(
    epsilon: Annotated[str, typer.Option(help="Privacy budgets, comma-separated; each method trains at each.")] = "1,3",
    delta: Annotated[float, typer.Option(help=f"Below 1/N, with N = {TRAIN_IMAGES} training images.")] = DEFAULTS.delta,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = DEFAULTS.epochs,
    batch_size: Annotated[int, typer.Option(help="Expected size of a Poisson batch.")] = DEFAULTS.batch_size,
    max_grad_norm: Annotated[float, typer.Option(help="Clipping threshold of a sample.")] = DEFAULTS.max_grad_norm,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the private methods; default: each its own.")] = (
        DEFAULTS.lr
    ),
    seed: Annotated[int, typer.Option(help="Of weights, batches, projections and noise.")] = DEFAULTS.seed,
    output: Annotated[Path, typer.Option(help="Folder for figure.png and results.json.")] = Path("runs/digits"),
    methods: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated, out of {', '.join(CONTENDERS)}; recipe: what lsg train chooses by itself."
        ),
    ] = "lsg,rgp,dpsgd,recipe,non-private",
    width: Annotated[int, typer.Option(help="Channels of the wide network whose steps are timed; 0: none.")] = 256,
) -> None:
    """Where low rank pays and where it does not: LSG, RGP and DPSGD on handwritten digits, and in a wide network."""
    settings = Settings(_numbers(epsilon), delta, epochs, batch_size, max_grad_norm, lr, seed)
    contenders = chosen(methods)
    from lsg.demo.verdict import verdict  # with PyTorch, for which help and errors of usage need not wait
    from lsg.demo.wide import wide_costs
    from lsg.models import small_cnn

    console = Terminal()
    if width:
        small_cnn(image_size=8, width=width)  # refuses a bad one
    _prepare(output)
    with _one_thread():
        configs = [(contender, config) for contender in contenders for config in settings.configs(contender)]
        runs, origin = _train_all(configs, console), provenance()
        console.print(_accuracy_table(runs, settings))
        console.lines(_notes(settings), style="dim")
        costs = wide_costs(contenders, width) if width else []
    if costs:
        console.print(_cost_table(costs, width))
    lines = verdict(runs, costs)
    console.lines("\n".join(lines))
    _write(output, runs, costs, lines, settings, origin)
    console.print(f"Wrote {output / 'figure.png'} and {output / 'results.json'}", style="dim", soft_wrap=True)


def _numbers(text: str) -> tuple[float, ...]:
    """Budgets, each once."""
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ConfigurationError(f"epsilon={text} must be numbers with commas between them, such as 1,3") from None
    if not found:
        raise ConfigurationError("epsilon: none given; give one number or more, such as 1,3")
    return found


def _prepare(output: Path) -> None:
    """Before training, so that a folder that cannot be written costs no training."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"output={output}: cannot make this folder ({error.strerror})") from None
    if not os.access(output, os.W_OK):
        raise ConfigurationError(f"output={output}: cannot write into this folder")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A model this small gains little from more threads, and on busy cores they lose most of the time on waiting."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train_all(configs: list[tuple[str, RunConfig]], console: Terminal) -> list[DemoRun]:
    """Train one after the other. The runs' folders are removed: the demo keeps their numbers alone."""
    from lsg.demo.runs import DemoRun
    from lsg.train.run import run

    bar = Progress(
        Words("{task.description}", "bold"),
        BarColumn(bar_width=20),
        Words("epoch"),
        MofNCompleteColumn(),
        Words("ε {task.fields[epsilon]}  loss {task.fields[loss]} (not private)"),
        TimeElapsedColumn(),
        console=console,
    )
    runs = []
    with bar, tempfile.TemporaryDirectory() as folder:
        for number, (contender, config) in enumerate(configs):
            task = bar.add_task(f"{contender:<12}", total=config.epochs, epsilon="0.00", loss="-----")
            runs.append(DemoRun(contender, run(config, Path(folder) / str(number), listener=_EpochBar(bar, task))))
    return runs


class _EpochBar(Listener):
    """Moves a run's progress bar on after each epoch."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def epoch(self, row: dict[str, Any]) -> None:
        loss = "nan" if row["loss"] is None else f"{row['loss']:.3f}"
        self._bar.update(self._task, advance=1, epsilon=f"{epsilon_text(row['epsilon']):<4}", loss=loss)


def _notes(settings: Settings) -> str:
    rate = (
        "at its best rate of the same search on a validation part"
        if settings.lr is None
        else f"at rate {settings.lr:g}"
    )
    return (
        f"Network: {NETWORK}, each private method {rate}; lsg train's choice has its own.\n"
        f"Percent of {TEST_IMAGES} held-out images, last epoch, ± standard error; one seed: smaller gaps mean little.\n"
        "Noise: seeded, so that runs repeat. Fine for public data like these, wrong for secrets."
    )


def _accuracy_table(runs: list[DemoRun], settings: Settings) -> Table:
    """A row a method, a column a budget."""
    budgets = list(dict.fromkeys(one.epsilon for one in runs))
    table = Table(title=f"Accuracy on digits at δ = {settings.delta:g}, seed {settings.seed}")
    table.add_column("method", style="bold")
    for column in ("numbers\nnoised", *map(_budget, budgets), "time"):
        table.add_column(column, justify="right")
    for label in dict.fromkeys(one.label for one in runs):
        own = {one.epsilon: one for one in runs if one.label == label}
        first = next(iter(own.values()))
        cells = [f"{100 * own[b].score:.1f} ± {100 * own[b].error:.1f}" if b in own else "" for b in budgets]
        noised = f"{first.noise_dimensions:,}" if first.noise_dimensions else "none"
        seconds = sum(one.result.seconds for one in own.values()) / len(own)
        table.add_row(label, noised, *cells, f"{seconds:.1f} s")
    return table


def _budget(epsilon: float | None) -> str:
    return "no privacy" if epsilon is None else f"ε = {epsilon:g}"


def _cost_table(costs: list[Cost], width: int) -> Table:
    table = Table(title=f"A record's cost in a network of {width} and {2 * width} channels")
    table.add_column("method", style="bold")
    for column in ("numbers noised", "gradient's KiB", "milliseconds"):
        table.add_column(column, justify="right")
    for cost in costs:
        known = (f"{cost.noised:,}", f"{cost.bytes / 2**10:,.0f}") if cost.noised else ("none", "none")
        table.add_row(cost.label, *known, f"{cost.milliseconds:.2f}")
    return table


def _write(
    output: Path, runs: list[DemoRun], costs: list[Cost], lines: list[str], settings: Settings, origin: dict[str, Any]
) -> None:
    from lsg.report.figures import save_demo_figure  # matplotlib takes a second, which --help need not

    document = {
        **origin,
        "task": {"data": "scikit-learn digits", "training_images": TRAIN_IMAGES, "test_images": TEST_IMAGES},
        "settings": dataclasses.asdict(settings),
        "seed": settings.seed,
        "notes": "null epsilon: infinite, no guarantee. loss: of the training data, not private.",
        "runs": [one.numbers() for one in runs],
        "wide": [dataclasses.asdict(cost) for cost in costs],
        "verdict": lines,
    }
    write_atomic(output / "results.json", to_json(document, indent=2) + "\n")
    scores: dict[str, dict[str, tuple[float, float]]] = {}
    for one in runs:
        scores.setdefault(one.label, {})[_budget(one.epsilon)] = (one.score, one.error)
    save_demo_figure(
        output / "figure.png",
        scores,
        {cost.label: cost.milliseconds for cost in costs},
        titles=(
            f"Handwritten digits, private methods at δ = {settings.delta:g}",
            "Accuracy (± standard error)",
            "Time in a wide network",
        ),
    )
