"""Errors of every command: one line that names the culprit instead of a traceback."""

import functools
from collections.abc import Callable
from typing import Any

import typer

from lsg.errors import LsgError

FAILED, BAD_USAGE = 1, 2


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Deliberate errors end the command with exit code 2, files that cannot be written or read with 1."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (LsgError, OSError) as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(BAD_USAGE if isinstance(error, LsgError) else FAILED) from None

    return run
