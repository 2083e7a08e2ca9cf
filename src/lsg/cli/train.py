"""`lsg train`: a task, a model and a method in, a privately trained model with its privacy statement out."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TimeRemainingColumn,
)
from rich.table import Table

from lsg.accounting.rounding import epsilon_text
from lsg.cli.run_options import options_of_runs
from lsg.distributed.launch import goes_on, joined, launched, writes
from lsg.files.foreign_text import visible
from lsg.files.stop_signals import stop_if_asked
from lsg.files.terminal import Terminal, Words
from lsg.tasks.measures import MEASURES, measure_of
from lsg.train.config import (
    RunConfig,
)
from lsg.train.folder import RunFolder
from lsg.train.listener import Listener, RunStart

if TYPE_CHECKING:
    from lsg.distributed.group import Group
    from lsg.train.result import RunResult

SECONDS_BETWEEN_LINES = 3.0  # about what is read, where the output is no terminal

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
        _print_warning(console, warning)
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

    bar = Progress(
        Words("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        Words("{task.fields[state]}"),
        Words("ETA"),
        TimeRemainingColumn(compact=True),
        console=console,
    )
    listener = _Bar(bar, console)
    try:
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
        if bar.live.is_started:  # one that shows nothing yet would leave an empty line
            bar.stop()


class _Bar(Listener):
    """A progress bar; where the output is not a terminal, one line an epoch."""

    def __init__(self, bar: Progress, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bar, self._epochs, self._batch_size = bar, 0, 0
        self._task: TaskID | None = None
        self._epsilon, self._epochs_done, self._measured = "0.00", 0, ""
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def note(self, text: str) -> None:
        self._terminal.lines(text, style="dim")

    def warning(self, text: str) -> None:
        _print_warning(self._terminal, text)

    def prepared(self, what: str, done: int, total: int) -> None:
        stop_if_asked()
        if not self._terminal.is_terminal:
            if time.monotonic() > self._next_line:
                self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
                self._terminal.print(f"{what}: {100 * done / total:.0f} %", style="dim", soft_wrap=True)
            return
        self._bar.start()
        if self._task is None:
            self._task = self._bar.add_task(what, total=total, state="")
        self._bar.update(self._task, completed=done)
        if done == total:
            self._bar.remove_task(self._task)
            self._task = None

    def started(self, start: RunStart) -> None:
        self._batch_size, self._epsilon = start.batch_size, epsilon_text(start.epsilon)
        self._epochs, self._epochs_done = start.epochs, start.epochs_done
        self.note(
            f"{start.protected.counted}, {start.steps:,} steps of about {start.batch_size:,}, noise multiplier "
            f"{start.noise_multiplier:.4g} on {start.noise_dimensions:,} numbers for {start.trained_parameters:,} "
            "trained parameters"
        )
        self._bar.start()
        label = self._label(start.epochs_done + 1)
        self._task = self._bar.add_task(label, total=start.steps, completed=start.steps_done, state=self._state(None))

    def step(self, done: int) -> None:
        stop_if_asked()
        assert self._task is not None
        self._bar.update(self._task, completed=done, state=self._state(self._bar.tasks[0].speed))

    def epoch(self, row: dict[str, Any]) -> None:
        assert self._task is not None
        self._epsilon, self._epochs_done = epsilon_text(row["epsilon"]), row["epoch"]
        self._measured = _measured(row)
        label = self._label(min(row["epoch"] + 1, self._epochs))
        state = self._state(self._bar.tasks[0].speed)
        self._bar.update(self._task, completed=row["steps"], description=label, state=state)
        if not self._terminal.is_terminal:
            self._terminal.print(
                f"epoch {row['epoch']}: {MEASURES[row['measure']].labelled(row['score'])}, ε {self._epsilon}, "
                f"{row['samples_per_second']:,.0f} samples/s, {self._measured}",
                soft_wrap=True,
            )

    def sample(self, epoch: int, text: str) -> None:
        self._terminal.print(
            f"after epoch {epoch}, at ε {self._epsilon}, it writes: {text}", style="dim", soft_wrap=True
        )

    def _label(self, epoch: int) -> str:
        return f"epoch {epoch}/{self._epochs}"

    def _state(self, steps_per_second: float | None) -> str:
        speed = f"{steps_per_second * self._batch_size:,.0f}" if steps_per_second else "-"
        return f"ε {self._epsilon} after epoch {self._epochs_done}  {speed}/s  {self._measured}"


def _print_warning(console: Terminal, text: str) -> None:
    console.print(f"WARNING: {text}", style="bold yellow", soft_wrap=True)


def _measured(row: dict[str, Any]) -> str:
    """What an epoch's row tells of the training data. The mark comes first, as a narrow terminal cuts the end off."""
    known = ["loss -" if row["loss"] is None else f"loss {row['loss']:.3f}"]
    if row["clip_share"] is not None:
        known.append(f"clipped {100 * row['clip_share']:.0f} %")
    if row["noise_norm"] and row["signal_norm"] is not None:
        known.append(f"signal/noise {row['signal_norm'] / row['noise_norm']:.2g}")
    return f"not private: {', '.join(known)}"


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
