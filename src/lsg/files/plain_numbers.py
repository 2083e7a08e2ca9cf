"""NumPy's numbers in, Python's own out, which checks, files and reprs expect."""

from numbers import Integral, Real
from typing import Any


def plain(value: Any) -> Any:
    """Anything but a number as it is; lists and tuples of numbers number by number."""
    if isinstance(value, list | tuple):
        return type(value)(plain(part) for part in value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
