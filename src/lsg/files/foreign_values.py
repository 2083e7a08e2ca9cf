"""Text of a foreign file in, values out: JSON, TOML, YAML and CSV, each with limits. Raises ValueError in short words.

A small file must not become a large value, and no value one that Python fails on later: nesting, digits of numbers,
names given twice and YAML's aliases have limits here. How large a file may be is `foreign_files`' to say.
"""

import csv
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lsg.extras import needs_extra

DEEPEST = 100  # levels of nesting
DIGITS = 1000  # of a whole number: more are no number of anything
PARTS = 200  # of one dotted name in TOML, whose reading takes time quadratic in them
FIELD = 1 << 24  # characters of a field of CSV


def json_value(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """An object that names a key twice is refused, at any depth. parse_constant: of NaN and the infinities."""
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_int=_integer, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    whole = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if whole.count(b"[") + whole.count(b"{") > DEEPEST:
        _check(found)
    return found


def toml_value(text: str) -> dict[str, Any]:
    if any(line.count(".") > PARTS for line in text.split("\n")):
        raise ValueError(f"a line with more than {PARTS} dots")
    _check_brackets(text)
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # a number of thousands of digits, say
        raise ValueError(_first_line(error)) from None
    _check(found)
    return found


def yaml_value(text: str, what: str = "YAML") -> Any:
    """Plain values only. An alias, which repeats another part, is refused: a few of them can fill all memory.

    what: it is, for whom the package is missing.
    """
    with needs_extra("train", what):
        import yaml

    class Limited(yaml.SafeLoader):
        """PyYAML takes the last of two equal keys without a word, and knows no limits."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read", event.start_mark)
            self.depth += 1
            if self.depth > DEEPEST:
                raise ValueError(_TOO_DEEP)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # no key of a setting; PyYAML refuses those that cannot be one at all
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    _check_brackets(text)
    loader = None
    try:
        loader = Limited(text)  # refuses control characters
        found = loader.get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        # PyYAML has no words of its own for a date that is none, a number too long, !!int without digits
        raise ValueError(f"a value that cannot be read ({_first_line(error)})") from None
    finally:
        if loader is not None:
            loader.dispose()
    _check(found)
    return found


def csv_rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Of each row, the number of the line that it starts at and its fields; a quoted text may go on for several lines.

    Raises ValueError with the line's number before the reason.
    """
    csv.field_size_limit(FIELD)
    reader = csv.reader(lines, strict=True)
    number = 1
    try:
        for fields in reader:
            yield number, fields
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {number}: not valid CSV ({error})") from None


_TOO_DEEP = f"more than {DEEPEST} levels of nesting"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"'{key[:80]}' is given twice")
        found[key] = value
    return found


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def _check(value: Any) -> None:
    """Without recursion: nesting and whole numbers, which hexadecimal ones make long in few characters."""
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(_TOO_DEEP)
        depth += 1
        below: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                below += [*part.keys(), *part.values()]
            elif isinstance(part, list | tuple | set):
                below += part
            elif isinstance(part, int) and part.bit_length() > 3 * DIGITS:
                raise ValueError(f"a number of more than {DIGITS} digits")
        level = below


def _check_brackets(text: str) -> None:
    """Before a parser whose time is quadratic in open brackets. Those within quotation marks count too."""
    depth = 0
    for character in text:
        if character in "[{":
            depth += 1
            if depth > DEEPEST:
                raise ValueError(_TOO_DEEP)
        elif character in "]}":
            depth = max(0, depth - 1)


def _first_line(error: BaseException) -> str:
    if "integer string conversion" in str(error):  # Python's own words are for programmers
        return f"a number of more than {DIGITS} digits"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
