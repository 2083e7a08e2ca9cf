"""`lsg train`: a task, a model and a method in, a privately trained model with its privacy statement out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from lsg.accounting.rounding import epsilon_text
from lsg.cli.known_settings import check_usage
from lsg.cli.run_bar import RunBar, print_warning
from lsg.cli.run_options import options_of_runs
from lsg.distributed.launch import goes_on, joined, launched, writes
from lsg.files.foreign_text import visible
from lsg.files.sign_of_life import doing
from lsg.files.terminal import Terminal
from lsg.tasks.measures import measure_of
from lsg.train.config import RunConfig
from lsg.train.folder import RunFolder
from lsg.train.listener import Listener

if TYPE_CHECKING:
    from lsg.distributed.group import Group
    from lsg.train.result import RunResult


INTERRUPTED = 130  # as shells have it


def train(
    output: Path, config: Path | None = None, resume: bool = False, checkpoint_every: int = 0, **given: Any
) -> None:
    """Train a model with differential privacy, on a task of the paper or on your own data.

    Options that are not given come from --config, and what is not there from the recipe: by default one that is
    chosen for the number of records, ε and the kind of model, and shown before training.

    On several processes: torchrun --nproc-per-node N -m lsg train ... They share each batch and give one model; what
    --max-restarts starts again goes on by itself.
    """
    known = {key: value for key, value in given.items() if value is not None}
    if not launched():  # of several processes the first one reads, and tells the others
        RunFolder(output).check_place(resume=resume)
        check_usage(output, config, resume, known)
    try:
        with joined() as group:
            _train(group, output, config, resume, checkpoint_every, known)
    except KeyboardInterrupt:
        if writes():
            raise
        raise typer.Exit(INTERRUPTED) from None  # one process says it


def _train(
    group: Group, output: Path, config: Path | None, resume: bool, checkpoint_every: int, known: dict[str, Any]
) -> None:
    from lsg.cli.run_settings import run_settings  # with PyTorch, for which help and errors of usage need not wait

    console = Terminal()

    def check_place(again: bool) -> None:  # before data are read, which may take minutes
        RunFolder(output).check_place(resume=resume or again)

    resume = goes_on(group, str(output.absolute()), check_place) or resume
    settings = partial(run_settings, output, config, resume, known, group=group)
    result = _run_with_bar(console, settings, output, resume, checkpoint_every)
    for warning in result.warnings:
        print_warning(console, warning)
    console.print(_summary(result))
    console.print(result.privacy["statement"], soft_wrap=True)
    console.print(
        f"{output}: model/, privacy.json (attach it to a release), metrics.jsonl, config.toml",
        style="dim",
        soft_wrap=True,
    )


def _signature() -> inspect.Signature:
    own = [
        ("output", Path, ..., typer.Option(help="Folder for the model and all that is told about it.")),
        (
            "config",
            Path | None,
            None,
            typer.Option(help="A TOML or YAML file of settings, such as a run's config.toml."),
        ),
        ("resume", bool, False, typer.Option("--resume", help="Go on with the run that --output holds.")),
        (
            "checkpoint_every",
            int,
            0,
            typer.Option(help="Steps between checkpoints; 0: after epochs, when it is worth it.", min=0),
        ),
    ]
    return inspect.Signature(options_of_runs(own))


train.__signature__ = _signature()  # type: ignore[attr-defined]
train.__annotations__ = {name: p.annotation for name, p in _signature().parameters.items()}


def _run_with_bar(
    console: Terminal, settings: Callable[[Listener], RunConfig], output: Path, resume: bool, checkpoint_every: int
) -> RunResult:
    from lsg.train.run import run  # with PyTorch, for which help and errors of usage need not wait

    listener = RunBar(console)
    try:
        with doing(listener.position):
            return run(settings(listener), output, resume=resume, listener=listener, checkpoint_every=checkpoint_every)
    except KeyboardInterrupt:
        folder = RunFolder(output)
        if folder.checkpoint.exists() and launched():
            told = " Go on with the same command and --resume, with as many processes: others repeat no lost step."
        elif folder.checkpoint.exists():
            told = f" Go on with: lsg train --resume --output {output}"
        elif (output / "config.toml").exists():
            told = f" There is no checkpoint yet. Start over with: lsg train --resume --output {output}"
        else:
            told = " Nothing was written."
        console.print(f"Stopped.{told}", soft_wrap=True)
        raise
    finally:
        listener.close()


def _summary(result: RunResult) -> Table:
    config = result.config
    table = Table(title=visible(f"{config.task}, {Path(config.model).name}"), show_header=False)
    table.add_column(style="bold")
    table.add_column()
    measure = measure_of(config.task)
    for part, score in result.scores.items():
        table.add_row(f"{measure.name} on {part}", measure.text(score))
    if len(result.scores) > 1:
        table.add_row(f"mean {measure.name}", measure.text(result.score))
    if result.untrained is not None:
        table.add_row(f"{measure.name} before training", measure.text(result.untrained))
    table.add_row("method", str(config.make_method()))
    spent = epsilon_text(result.epsilon)
    table.add_row("privacy spent", f"ε = {spent}" + (f", δ = {config.delta:g}" if result.epsilon is not None else ""))
    table.add_row("noise multiplier", f"{result.noise_multiplier:.4g}")
    table.add_row("steps", f"{result.steps:,}")
    table.add_row("training time", f"{result.seconds:.1f} s")
    return table
