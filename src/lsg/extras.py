"""Optional packages: imports that may fail come in, an error that names the extra to install goes out."""

import contextlib
from collections.abc import Iterator

from lsg.errors import ConfigurationError


class MissingExtraError(ConfigurationError, ImportError):
    """A package of an extra is not installed."""


@contextlib.contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Around imports of optional packages. what: who needs them, such as "the command line"; it begins the message."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "lsg":  # a file of our own: a mistake, not a missing package
            raise
        raise MissingExtraError(f"{what} needs the extra '{extra}': pip install 'lsg-dp[{extra}]'") from error
