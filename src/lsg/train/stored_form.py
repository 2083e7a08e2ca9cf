"""A stored state and one of our own in, a ValueError out where the stored one has another form: keys, types, shapes."""

from typing import Any

from torch import Tensor

LARGEST = 2**63  # of whole numbers


def check_form(stored: Any, own: Any, what: str) -> None:
    """What is a number here must be one there, and so on down. what: names the state in errors."""
    if isinstance(own, dict):
        if not isinstance(stored, dict) or stored.keys() != own.keys():
            raise ValueError(f"{what} has other parts")
        for key, value in own.items():
            check_form(stored[key], value, f"{what}, {key}")
    elif isinstance(own, list | tuple):
        if not isinstance(stored, list | tuple) or len(stored) != len(own):
            raise ValueError(f"{what} has other parts")
        for inner, value in zip(stored, own, strict=True):
            check_form(inner, value, what)
    elif isinstance(own, Tensor):
        if not isinstance(stored, Tensor) or stored.shape != own.shape:
            raise ValueError(f"{what} is no tensor of {list(own.shape)}")
    elif isinstance(own, int | float) and not isinstance(own, bool):
        check_number(stored, what, whole=isinstance(own, int))
    elif not isinstance(stored, type(own)):
        raise ValueError(f"{what} is {stored!r:.80}")


def check_number(stored: Any, what: str, *, whole: bool = False) -> None:
    kinds = int if whole else int | float
    if isinstance(stored, bool) or not isinstance(stored, kinds):
        raise ValueError(f"{what} is {stored!r:.80}, and no {'whole ' if whole else ''}number")
    if isinstance(stored, int) and not 0 <= stored < LARGEST:
        raise ValueError(f"{what} is {stored!r:.80}")
