"""The command `lsg`: one file a command, listed here and nowhere else."""

import io
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from lsg import __version__
from lsg.cli.audit import audit
from lsg.cli.bench import bench
from lsg.cli.budget import budget
from lsg.cli.demo import demo
from lsg.cli.errors import OneLineUsage, one_line_errors
from lsg.cli.explain import explain
from lsg.cli.report import report
from lsg.cli.train import train
from lsg.cli.tune import tune
from lsg.files.terminal import echo

app = typer.Typer(cls=OneLineUsage, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (audit, bench, budget, demo, explain, report, train, tune):
    app.command()(one_line_errors(command))
if find_spec("lsg.reproduce") is not None:  # that room can be deleted
    from lsg.reproduce.command import reproduce

    app.command()(one_line_errors(reproduce))


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
    app()
