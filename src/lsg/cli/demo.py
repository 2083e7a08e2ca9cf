"""`lsg demo`: trains on digits with each method at the same epsilon, as `lsg train` does; then compares the methods."""

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from lsg.accounting.rounding import epsilon_text
from lsg.errors import ConfigurationError
from lsg.files.atomic import write_atomic
from lsg.methods import METHODS, PRIVATE_METHODS
from lsg.tasks.digits import TEST_IMAGES, TRAIN_IMAGES
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.presets import preset
from lsg.train.provenance import provenance
from lsg.train.run import RunResult, run

PRESET = preset("digits", "lsg")  # the same for every private method


@dataclass(frozen=True)
class Settings:
    """What the methods share. `lr` is that of the private ones; non-private training has its preset's."""

    epsilon: float = 3.0
    delta: float = PRESET["delta"]
    epochs: int = PRESET["epochs"]
    batch_size: int = PRESET["batch_size"]
    max_grad_norm: float = PRESET["max_grad_norm"]
    lr: float = PRESET["lr"]
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epsilon", "max_grad_norm", "lr"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{name}={value:g} must be positive and finite")
        if not 0 < self.delta < 1 / TRAIN_IMAGES:
            raise ConfigurationError(
                f"delta={self.delta:g} must be above 0 and below 1/N = {1 / TRAIN_IMAGES:.3g} (N = {TRAIN_IMAGES} "
                "training images): a larger one allows publishing a record outright"
            )
        if self.epochs < 1:
            raise ConfigurationError(f"epochs={self.epochs} must be at least 1")
        if not 1 <= self.batch_size <= TRAIN_IMAGES:
            raise ConfigurationError(f"batch_size={self.batch_size} must lie between 1 and {TRAIN_IMAGES}")
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"seed={self.seed} must lie between 0 and 2^63 - 1")

    def config(self, method: str) -> RunConfig:
        """The run of `lsg train` that shows this method."""
        shared = dataclasses.asdict(self)
        if method not in PRIVATE_METHODS:
            del shared["epsilon"], shared["lr"]
        fixed = {"task": "digits", "model": "small-cnn-wide", "method": method, "device": "cpu"}
        return RunConfig(**{**preset("digits", method), **shared, **fixed})


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
    configs = [settings.config(method) for method in _chosen(methods)]
    _prepare(output)
    with _one_thread():
        results, origin = _train_all(configs, console), provenance()
    console.print(_table(results, settings))
    console.print(
        f"Accuracy: last epoch, {TEST_IMAGES} held-out images, ± standard error; smaller gaps mean little.\n"
        "Noise: seeded, so that runs repeat. Fine for public data like these, wrong for secrets.",
        style="dim",
        soft_wrap=True,
    )
    _write(output, results, settings, origin)
    console.print(f"Wrote {output / 'figure.png'} and {output / 'results.json'}", soft_wrap=True)


def _chosen(names: str) -> list[str]:
    """Names of METHODS; capital letters and missing dashes are forgiven."""
    by_letters = {name.replace("-", ""): name for name in METHODS}
    wanted = {name.strip().lower().replace("-", ""): name.strip().lower() for name in names.split(",") if name.strip()}
    for letters, name in wanted.items():
        if letters not in by_letters:
            raise ConfigurationError(f"methods: '{name}' is not known; choose from {', '.join(METHODS)}")
    if not wanted:
        raise ConfigurationError(f"methods: none given; choose from {', '.join(METHODS)}")
    return [by_letters[letters] for letters in wanted]


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


def _train_all(configs: list[RunConfig], console: Console) -> list[RunResult]:
    """Train one after the other. The runs' folders are removed: the demo keeps their numbers alone."""
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("epoch"),
        MofNCompleteColumn(),
        TextColumn("ε {task.fields[epsilon]}  loss {task.fields[loss]} [dim](not private)"),
        TimeElapsedColumn(),
        console=console,
    )
    results = []
    width = max(len(_label(config)) for config in configs)
    with bar, tempfile.TemporaryDirectory() as folder:
        for config in configs:
            task = bar.add_task(f"{_label(config):<{width}}", total=config.epochs, epsilon="0.00", loss="-----")
            results.append(run(config, Path(folder) / config.method, listener=_EpochBar(bar, task)))
    return results


class _EpochBar(Listener):
    """Moves a method's progress bar on after each epoch."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def epoch(self, row: dict[str, Any]) -> None:
        loss = "nan" if row["loss"] is None else f"{row['loss']:.3f}"
        self._bar.update(self._task, advance=1, epsilon=f"{epsilon_text(row['epsilon']):<4}", loss=loss)


def _label(config: RunConfig) -> str:
    return str(config.make_method())


def _standard_error(result: RunResult) -> float:
    """Of the accuracy, from the number of test images alone (binomial)."""
    return math.sqrt(result.score * (1 - result.score) / TEST_IMAGES)


def _table(results: list[RunResult], settings: Settings) -> Table:
    table = Table(title=f"Digits at ε = {settings.epsilon:g}, δ = {settings.delta:g}, seed {settings.seed}")
    table.add_column("method", style="bold")
    for column in ("test accuracy", "ε spent", "noise dimensions", "training time"):
        table.add_column(column, justify="right")
    for result in results:
        dimensions = result.privacy["noise_dimensions"]
        table.add_row(
            _label(result.config),
            f"{100 * result.score:.1f} ± {100 * _standard_error(result):.1f} %",
            epsilon_text(result.epsilon),
            f"{dimensions:,}" if dimensions else "none",
            f"{result.seconds:.1f} s",
        )
    return table


def _write(output: Path, results: list[RunResult], settings: Settings, origin: dict[str, Any]) -> None:
    from lsg.report.figures import save_accuracy_figure  # matplotlib takes a second, which --help need not

    document = {
        **origin,
        "task": {"data": "scikit-learn digits", "training_images": TRAIN_IMAGES, "test_images": TEST_IMAGES},
        "settings": dataclasses.asdict(settings),
        "seed": settings.seed,
        "notes": "null epsilon: infinite, no guarantee. loss: of the training data, not private.",
        "methods": {_label(result.config): _numbers(result) for result in results},
    }
    write_atomic(output / "results.json", json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    save_accuracy_figure(
        output / "figure.png",
        {_label(result.config): result.curve for result in results},
        errors={_label(result.config): _standard_error(result) for result in results},
        title=f"Handwritten digits, private methods at ε = {settings.epsilon:g}, δ = {settings.delta:g}",
        references=[_label(result.config) for result in results if result.epsilon is None],
    )


def _numbers(result: RunResult) -> dict[str, Any]:
    """Of one method. Its accuracy is the last epoch's, not the best one's: that would be picked on test data."""
    return {
        "test_accuracy": result.score,
        "test_accuracy_standard_error": _standard_error(result),
        "epsilon": result.epsilon,
        "lr": result.config.lr,
        "noise_multiplier": result.noise_multiplier,
        "noise_dimensions": result.privacy["noise_dimensions"],
        "training_seconds": result.seconds,
        "epochs": [_epoch(row) for row in result.history],
    }


def _epoch(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a run's metrics by the demo's own names."""
    samples = round(row["samples_per_second"] * row["seconds"])
    same = {key: row[key] for key in ("steps", "epsilon", "loss", "score", "seconds", "lr")}
    return {"number": row["epoch"], **same, "samples": samples}
