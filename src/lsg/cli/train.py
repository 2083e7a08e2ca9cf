"""`lsg train`: a task, a model and a method in, a privately trained model with its privacy statement out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lsg.accounting.rounding import epsilon_text
from lsg.cli.known_settings import check_usage
from lsg.cli.run_bar import RunBar, print_warning
from lsg.distributed.launch import goes_on, joined, launched, writes
from lsg.files.foreign_text import visible
from lsg.files.sign_of_life import doing
from lsg.files.terminal import Terminal
from lsg.methods import METHODS
from lsg.tasks.names import KINDS, ZOO_NAMES
from lsg.train.config import (
    LR_SCHEDULES,
    OPTIMIZERS,
    POOLING,
    PRECISIONS,
    TRAINABLE,
    RunConfig,
    field_type,
)
from lsg.train.folder import RunFolder
from lsg.train.listener import Listener
from lsg.train.protected import RECORDS_OF_A_PERSON

if TYPE_CHECKING:
    from lsg.distributed.group import Group
    from lsg.train.result import RunResult

# Every field of RunConfig is an option; a field without a line here is an error at import.
_HELP = {
    "What": {
        "task": f"One of {', '.join(KINDS)}.",
        "data": "A local path or a hub name. Without it, the task's own source.",
        "model": f"A hub id, a local folder, or one of {', '.join(ZOO_NAMES)} for images.",
        "recipe": "auto, or paper: where all comes from that you do not set.",
        "method": f"One of {', '.join(METHODS)}.",
        "text_column": "Of your own texts; guessed without it.",
        "pair_column": "Of the second text of a pair.",
        "label_column": "Of the labels.",
        "unit_column": "Of the ids of persons: all records of a person are then protected together, and --batch-size, "
        "--epsilon and --delta are about persons.",
        "max_length": "Tokens of a text; the rest is cut off.",
        "train_limit": "Use about this share of the training records, such as 0.1, the same for every seed; 0: all.",
        "validation": "Hold out about this share of the training records and score on them: for tuning.",
        "tuning_part": "Leave out this share of the training records: lsg tune --held-out chose the settings on them.",
    },
    "Privacy": {
        "epsilon": "The privacy budget. This or --noise-multiplier.",
        "noise_multiplier": "Standard deviation of the noise over the clipping threshold.",
        "delta": "Well below one over the number of records (or persons).",
        "accountant": "prv, pld or rdp.",
        "clipping": "flat, per_layer or automatic.",
        "max_grad_norm": "Clipping threshold of a sample's gradient.",
        "max_records_per_unit": "With --unit-column: the most records of a person in a step, chosen anew for each; "
        f"{RECORDS_OF_A_PERSON} without it.",
    },
    "Method": {
        "rank": "r of lsg and rgp.",
        "sparsity": "p of lsg and sparse-dpsgd: the share of units that is not trained.",
        "importance": "What makes a unit worth training: weight, or random, factor, direct (negative results).",
        "trainable": f"One of {', '.join(TRAINABLE)}: paper trains matrices and the head, bias vectors and the head.",
        "pooling": f"One of {', '.join(POOLING)}: what the head of a text model sees.",
        "head_scale": "Factor on the head's gradients before clipping.",
    },
    "Training": {
        "optimizer": f"One of {', '.join(OPTIMIZERS)}.",
        "lr": "Learning rate.",
        "lr_schedule": f"One of {', '.join(LR_SCHEDULES)}.",
        "warmup": "Share of the steps in which the rate rises, such as 0.1.",
        "averaging": "Score and save the weights' average over about this share of the steps, such as 0.1; 0: none.",
        "head_lr": "Factor on the head's learning rate.",
        "momentum": "Of sgd.",
        "weight_decay": "Of either optimizer.",
        "adam_eps": "Of adam.",
        "batch_size": "Expected size of a Poisson batch.",
        "epochs": "Expected passes over the records.",
        "views": "Randomly moved views of each image in a step, averaged before the clip; 1: images as they are.",
        "seed": "Of new weights, batches, projections and noise: repeats a run. Without it, a secret one is drawn.",
    },
    "Machine (none of these changes a guarantee)": {
        "device": "auto, cpu, cuda, cuda:1, ...",
        "precision": f"One of {', '.join(PRECISIONS)}.",
        "max_physical_batch_size": "Samples (or views of them) computed at once: lower it if memory runs out.",
        "max_physical_tokens": "Of texts, tokens computed at once: records times the longest of them.",
        "compile": "Compile the model. Without it, where a GPU's run is long enough to win the time back.",
        "cuda_graphs": "Record and replay the GPU's work. Without it, where the model was seen to be safe for that.",
    },
}


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


def options_of_runs(own: Sequence[tuple[str, Any, Any, Any]]) -> list[inspect.Parameter]:
    """Options of a command: its own (name, type, default, option), then RunConfig's fields. None means not given."""
    types = {field.name: field.type for field in dataclasses.fields(RunConfig)}
    missing = types.keys() ^ {name for options in _HELP.values() for name in options}
    assert not missing, f"options and RunConfig differ: {missing}"
    generated = [
        (name, field_type(types[name]) | None, None, typer.Option(help=text, rich_help_panel=panel))
        for panel, options in _HELP.items()
        for name, text in options.items()
    ]
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kind, opt],
            default=inspect.Parameter.empty if default is ... else default,
        )
        for name, kind, default, opt in (*own, *generated)
    ]


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
    for part, score in result.scores.items():
        table.add_row(f"accuracy on {part}", f"{100 * score:.2f} %")
    if len(result.scores) > 1:
        table.add_row("mean accuracy", f"{100 * result.score:.2f} %")
    table.add_row("method", str(config.make_method()))
    spent = epsilon_text(result.epsilon)
    table.add_row("privacy spent", f"ε = {spent}" + (f", δ = {config.delta:g}" if result.epsilon is not None else ""))
    table.add_row("noise multiplier", f"{result.noise_multiplier:.4g}")
    table.add_row("steps", f"{result.steps:,}")
    table.add_row("training time", f"{result.seconds:.1f} s")
    return table
