"""Strict JSON: text in, values out; an object that names a key twice is refused, at any depth."""

import json
from collections.abc import Callable
from typing import Any


def loads(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """As `json.loads`, which takes the last of two values without a word. Raises ValueError."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=parse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"'{key}' is given twice")
        found[key] = value
    return found
