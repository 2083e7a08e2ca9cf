"""The command `lsg`: one file a command, listed here and nowhere else."""

import io
import os
import sys
import warnings
from importlib.util import find_spec
from typing import Annotated

import typer

from lsg import __version__
from lsg.cli.audit import audit
from lsg.cli.bench import bench
from lsg.cli.budget import budget
from lsg.cli.demo import demo
from lsg.cli.errors import OneLineUsage, end_unwritten, in_one_process, one_line_errors
from lsg.cli.explain import explain
from lsg.cli.report import report
from lsg.cli.train import train
from lsg.cli.tune import tune
from lsg.distributed.launch import writes
from lsg.files.terminal import echo

app = typer.Typer(cls=OneLineUsage, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(one_line_errors(train))
for command in (audit, bench, budget, demo, explain, report, tune):
    app.command()(one_line_errors(in_one_process(command)))
if find_spec("lsg.reproduce") is not None:  # that room can be deleted
    from lsg.reproduce.command import reproduce

    app.command()(one_line_errors(in_one_process(reproduce)))


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"lsg {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Differentially private training in a low-rank, sparse gradient space."""


def run() -> None:
    """The installed command. Where the console's encoding has no ε, a question mark is shown for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if not writes():
        _be_silent()
    try:
        app()
    except OSError as error:  # of help and errors of usage, which no command catches: they cannot be shown
        end_unwritten(error)


def _be_silent() -> None:
    """One of several processes tells what all of them do. Errors of this one are still shown."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process lives
    warnings.simplefilter("ignore")
    for name, value in (("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("TRANSFORMERS_VERBOSITY", "error")):
        os.environ.setdefault(name, value)
