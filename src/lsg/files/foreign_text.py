"""Text that others wrote (data, names, options, paths) in, text that can only be read out.

Everything that prints, or writes a page or a file for others, goes through here: no character moves the cursor, begins
a line, turns the direction of reading or hides. Such a one is shown by its number, as in a Python string.
"""

import html
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from lsg.files.sign_of_life import spoken

LONGEST = 2000  # characters of a message: more is not read, and may be the work of a file of a million columns
NAMED = 10  # names in a list within a message
_CUT = " [...] "
# Controls (escape sequences begin with one), line and paragraph separators, marks and overrides of the direction, what
# has no width, halves of characters, and tags. Joiners (U+200C, U+200D) stay: scripts and emoji need them.
_HARMFUL = "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
_HARMFUL += "\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_IN_LINES = re.compile(f"[{_HARMFUL}]")
_IN_A_LINE = re.compile(f"[\t\n{_HARMFUL}]")
_NAMES = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def visible(text: object, longest: int = LONGEST) -> str:
    """One line, however many the text has. Of one that is longer than `longest`, the middle is left out."""
    whole = str(text)
    if len(whole) > longest:
        half = (longest - len(_CUT)) // 2
        whole = whole[:half] + _CUT + whole[-half:]
    return _IN_A_LINE.sub(_number, whole)


def visible_lines(text: object) -> str:
    """The same, with the line breaks and tabs of the text; for texts of our own that foreign ones stand in."""
    return _IN_LINES.sub(_number, str(text))


def listed(names: Iterable[str], most: int = NAMED) -> str:
    """In quotation marks, with commas between them. Of many, the first ones and how many more there are."""
    known = list(names)
    more = f" and {len(known) - most:,} more" if len(known) > most else ""
    return ", ".join(f"'{visible(name, 80)}'" for name in known[:most]) + more


def in_html(text: object) -> str:
    """Text, for an element's content or an attribute in quotation marks."""
    return html.escape(visible_lines(text))


def to_json(value: Any, indent: int | None = None, *, compact: bool = False) -> str:
    """Strict JSON in which harmful characters are written by number. Numbers that are not finite, which JSON lacks, are
    null: writing a result cannot fail on a number.

    compact: without blanks between parts.
    """
    separators = (",", ":") if compact else None
    text = json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False, separators=separators)
    return _IN_LINES.sub(lambda found: json.dumps(found[0])[1:-1].replace("\x7f", "\\u007f"), text)


def as_key(value: Any) -> str:
    """A text that is equal for equal values, for comparing them."""
    return json.dumps(value, sort_keys=True, default=str)


def in_script(value: Any) -> str:
    """JSON that can stand in a script element: no "</script>" and no "<!--" can occur in it."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))  # escapes U+2028 and all beyond ASCII
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def in_toml(text: str) -> str:
    """A string of TOML, in quotation marks, in which harmful characters are written by number."""
    quoted = json.dumps(text, ensure_ascii=False)
    return _IN_LINES.sub(lambda found: f"\\U{ord(found[0]):08x}", quoted)


def say(text: str) -> None:
    """A line to stderr, for people who use the library without the command line, and for those who wait."""
    spoken()
    write_line(visible(text), sys.stderr)


def write_line(line: str, stream: TextIO | None) -> None:
    """As one piece, since threads say things, too; nowhere if the stream was closed before Python began."""
    if stream is not None:
        print(f"{line}\n", end="", file=stream, flush=True)


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it: not a name with bytes of another encoding, nor half a character out of JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(found: re.Match[str]) -> str:
    character = found[0]
    if character in _NAMES:
        return _NAMES[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a name that is not UTF-8, as Python keeps it
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
