"""`lsg demo`: trains on digits with each method at the same epsilon; a table, a figure and a results.json come out."""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lsg.accounting.rounding import epsilon_text
from lsg.errors import ConfigurationError
from lsg.files.atomic import write_atomic
from lsg.methods import METHODS, Method, make_method
from lsg.tasks.digits import TEST_IMAGES, TRAIN_IMAGES
from lsg.train.digits import Run, Settings, train_digits
from lsg.train.loop import Epoch
from lsg.train.provenance import provenance

DEFAULTS = Settings()


def demo(
    epsilon: Annotated[float, typer.Option(help="Privacy budget of every private method.")] = DEFAULTS.epsilon,
    delta: Annotated[float, typer.Option(help=f"Below 1/N, with N = {TRAIN_IMAGES} training images.")] = DEFAULTS.delta,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = DEFAULTS.epochs,
    batch_size: Annotated[int, typer.Option(help="Expected size of a Poisson batch.")] = DEFAULTS.batch_size,
    max_grad_norm: Annotated[float, typer.Option(help="Clipping threshold of a sample.")] = DEFAULTS.max_grad_norm,
    lr: Annotated[float, typer.Option(help="Learning rate of the private methods.")] = DEFAULTS.lr,
    seed: Annotated[int, typer.Option(help="Of weights, batches, projections and noise.")] = DEFAULTS.seed,
    output: Annotated[Path, typer.Option(help="Folder for figure.png and results.json.")] = Path("runs/digits"),
    methods: Annotated[str, typer.Option(help=f"Comma-separated, out of {', '.join(METHODS)}.")] = (
        "lsg,rgp,dpsgd,non-private"
    ),
) -> None:
    """Train privately on handwritten digits with LSG, RGP and DPSGD at one epsilon, beside non-private training."""
    console = Console()
    settings = Settings(epsilon, delta, epochs, batch_size, max_grad_norm, lr, seed)
    chosen = _chosen(methods)
    _prepare(output)
    with _one_thread():
        runs, origin = _train_all(chosen, settings, console), provenance()
    console.print(_table(runs, settings))
    console.print(
        f"Accuracy: last epoch, {TEST_IMAGES} held-out images, ± standard error; smaller gaps mean little.\n"
        "Noise: seeded, so that runs repeat. Fine for public data like these, wrong for secrets.",
        style="dim",
        soft_wrap=True,
    )
    _write(output, runs, settings, origin)
    console.print(f"Wrote {output / 'figure.png'} and {output / 'results.json'}", soft_wrap=True)


def _chosen(names: str) -> list[Method]:
    by_letters = {name.replace("-", ""): name for name in METHODS}
    wanted = {name.strip().lower().replace("-", ""): name.strip().lower() for name in names.split(",") if name.strip()}
    for letters, name in wanted.items():
        if letters not in by_letters:
            raise ConfigurationError(f"methods: '{name}' is not known; choose from {', '.join(METHODS)}")
    if not wanted:
        raise ConfigurationError(f"methods: none given; choose from {', '.join(METHODS)}")
    return [make_method(by_letters[letters]) for letters in wanted]


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
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train_all(methods: list[Method], settings: Settings, console: Console) -> list[Run]:
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("epoch"),
        MofNCompleteColumn(),
        TextColumn("ε {task.fields[epsilon]}  loss {task.fields[loss]} [dim](not private)"),
        TimeElapsedColumn(),
        console=console,
    )
    runs = []
    with bar:
        width = max(len(str(method)) for method in methods)
        for method in methods:
            task = bar.add_task(f"{method!s:<{width}}", total=settings.epochs, epsilon="0.00", loss="-----")

            def show(epoch: Epoch, task: Any = task) -> None:
                bar.update(task, advance=1, epsilon=f"{epsilon_text(epoch.epsilon):<4}", loss=f"{epoch.loss:.3f}")

            runs.append(train_digits(method, settings, on_epoch=show))
    return runs


def _table(runs: list[Run], settings: Settings) -> Table:
    table = Table(title=f"Digits at ε = {settings.epsilon:g}, δ = {settings.delta:g}, seed {settings.seed}")
    table.add_column("method", style="bold")
    for column in ("test accuracy", "ε spent", "noise dimensions", "training time"):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run.method,
            f"{100 * run.accuracy:.1f} ± {100 * run.standard_error:.1f} %",
            epsilon_text(run.epsilon),
            f"{run.noise_dimensions:,}" if run.noise_dimensions else "none",
            f"{run.seconds:.1f} s",
        )
    return table


def _write(output: Path, runs: list[Run], settings: Settings, origin: dict[str, Any]) -> None:
    from lsg.report.figures import save_accuracy_figure  # matplotlib takes a second, which --help need not

    results = {
        **origin,
        "task": {"data": "scikit-learn digits", "training_images": TRAIN_IMAGES, "test_images": TEST_IMAGES},
        "settings": dataclasses.asdict(settings),
        "seed": settings.seed,
        "notes": "null epsilon: infinite, no guarantee. loss: of the training data, not private.",
        "methods": {run.method: _numbers(run) for run in runs},
    }
    write_atomic(output / "results.json", json.dumps(results, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    save_accuracy_figure(
        output / "figure.png",
        {run.method: run.curve for run in runs},
        errors={run.method: run.standard_error for run in runs},
        title=f"Handwritten digits, private methods at ε = {settings.epsilon:g}, δ = {settings.delta:g}",
        references=[run.method for run in runs if run.epsilon == math.inf],
    )


def _numbers(run: Run) -> dict[str, Any]:
    return {
        "test_accuracy": run.accuracy,
        "test_accuracy_standard_error": run.standard_error,
        "epsilon": _finite(run.epsilon),
        "lr": run.lr,
        "noise_multiplier": run.noise_multiplier,
        "noise_dimensions": run.noise_dimensions,
        "training_seconds": run.seconds,
        "epochs": [{key: _finite(value) for key, value in dataclasses.asdict(epoch).items()} for epoch in run.history],
    }


def _finite(value: Any) -> Any:
    """JSON has neither infinity nor NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
