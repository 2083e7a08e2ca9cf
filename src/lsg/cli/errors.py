"""Errors of every command: one line that names the culprit instead of a traceback."""

import functools
from collections.abc import Callable
from typing import Any

import typer

from lsg.distributed.launch import launched, tells_errors
from lsg.errors import ConfigurationError, LsgError

FAILED, BAD_USAGE = 1, 2


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Deliberate errors end the command with exit code 2, files that cannot be written or read with 1. One of several
    processes shows the line."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (LsgError, OSError) as error:
            if tells_errors():
                typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(BAD_USAGE if isinstance(error, LsgError) else FAILED) from None

    return run


def in_one_process(command: Callable[..., None]) -> Callable[..., None]:
    """A command that several processes have nothing to gain from: torchrun is refused."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        if launched():
            raise ConfigurationError(
                f"lsg {command.__name__} works in one process: start it without torchrun or accelerate launch. "
                "lsg train is the command for several"
            )
        command(*args, **kwargs)

    return run
