"""Errors of every command: one line that names the culprit instead of a traceback."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from lsg.distributed.launch import launched, tells_errors
from lsg.errors import ConfigurationError, LsgError, first_line, is_out_of_memory
from lsg.files.foreign_text import visible
from lsg.files.stop_signals import asked_to_stop, stopping_by_exception
from lsg.files.terminal import echo

FAILED, BAD_USAGE = 1, 2


class OneLineUsage(TyperGroup):
    """Errors of usage show what was given without its control characters, and not all of what is very long."""

    def invoke(self, ctx: Any) -> Any:
        with _short_messages():
            return super().invoke(ctx)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _short_messages():
            return super().make_context(*args, **kwargs)


class _short_messages:  # noqa: N801  (a context manager)
    """Changes an error of usage on its way; a class, as it adds no frame to what is raised."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(getattr(error, "message", None), str) and hasattr(error, "exit_code"):
            error.message = visible(error.message, 500)  # type: ignore[union-attr]


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Deliberate errors end the command with exit code 2, files that cannot be written or read and want of memory with
    1, a signal with 128 and its number. One of several processes shows the line."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with stopping_by_exception():
                _check_numbers(kwargs)
                command(*args, **kwargs)
        except typer.Exit:
            raise
        except BaseException as error:
            if asked_to_stop():  # a library may have made another error of it
                raise typer.Exit(128 + asked_to_stop()) from None
            if not isinstance(error, LsgError | OSError) and not is_out_of_memory(error):
                raise
            if tells_errors():
                echo(f"Error: {visible(_told(error))}", err=True)
            raise typer.Exit(BAD_USAGE if isinstance(error, LsgError) else FAILED) from None

    return run


def end_unwritten(error: OSError) -> NoReturn:
    """What was left to show goes nowhere, so that Python does not try again and fail at its very end."""
    with contextlib.suppress(OSError):
        echo(f"Error: {visible(error)}", err=True)
    with contextlib.suppress(OSError, AttributeError):  # None: it was closed from the start
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(FAILED)


def _check_numbers(given: dict[str, Any]) -> None:
    """Whole numbers of options, which PyTorch, NumPy and files hold in 64 bits."""
    for name, value in given.items():
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ConfigurationError(f"--{name.replace('_', '-')} is a number of more than 18 digits")


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, LsgError | OSError) else f"out of memory ({first_line(error)})"


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
