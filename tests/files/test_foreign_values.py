"""Foreign files become values within limits: small files never become large values, nor tracebacks."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lsg.errors import ConfigurationError
from lsg.files.foreign_files import read_bytes, read_text
from lsg.files.foreign_values import csv_rows, json_value, toml_value, yaml_value

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = 30_000


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (json_value, "[" * DEEP, "levels"),
        (json_value, "[" * DEEP + "]" * DEEP, "levels"),
        (json_value, "[" * 200 + "]" * 200, "levels"),
        (json_value, '{"a":' * DEEP, "levels"),
        (json_value, "9" * 5000, "5,000 digits"),
        (json_value, '{"a": 1, "a": 2}', "'a' is given twice"),
        (json_value, '{"b": {"a": 1, "a": 2}}', "'a' is given twice"),
        (json_value, "\ufeff1", "BOM"),
        (json_value, "", "value"),
        (toml_value, "a = " + "[" * DEEP + "]" * DEEP, "levels"),
        (toml_value, "a = " + "{a = " * DEEP, "levels"),
        (toml_value, "a = " + "9" * 5000, "digits"),
        (toml_value, "a = 0x" + "f" * 5000, "digits"),
        (toml_value, "a = 2020-13-45", "line 1"),
        (toml_value, "a = 1\na = 2", "Cannot overwrite"),
        (toml_value, "a." * DEEP + "a = 1", "dots"),
        (yaml_value, LAUGHS, "aliases"),
        (yaml_value, "a: &a [*a]", "aliases"),
        (yaml_value, "[" * DEEP, "levels"),
        (yaml_value, "- " * DEEP, "levels"),
        (yaml_value, "a: 2020-13-45", "month"),
        (yaml_value, "a: " + "9" * 5000, "digits"),
        (yaml_value, "a: 0x" + "f" * 5000, "digits"),
        (yaml_value, "a: !!int x", "cannot be read"),
        (yaml_value, "a: !!float", "cannot be read"),
        (yaml_value, "a: 1\na: 2", "given twice"),
        (yaml_value, "a: \x00", "special characters"),
        (yaml_value, "a: !!python/object:os.system x", "tag"),
    ],
)
def test_what_is_too_much_is_refused_at_once_and_shortly(read: Callable[[str], Any], text: str, reason: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=reason) as caught:
        read(text)
    assert time.monotonic() - began < 5 and len(str(caught.value)) < 400


def test_ordinary_values_pass() -> None:
    assert json_value('{"a": [1, 2.5, "é", null, {"b": true}]}') == {"a": [1, 2.5, "é", None, {"b": True}]}
    assert json_value("[" * 90 + "]" * 90) and json_value("9" * 400) == int("9" * 400)
    assert toml_value('a = 1\nb.c = "x"') == {"a": 1, "b": {"c": "x"}}
    assert yaml_value("a: 1\nb: [x, 2.5]\nc: {d: true}") == {"a": 1, "b": ["x", 2.5], "c": {"d": True}}
    assert list(csv_rows(['a,"b\n', 'c"\n', "d,e\n"])) == [(1, ["a", "b\nc"]), (3, ["d", "e"])]


def test_broken_csv_names_the_line() -> None:
    with pytest.raises(ValueError, match="line 2: not valid CSV"):
        list(csv_rows(["a,b\n", '"c']))


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigurationError, match="not a regular file"):
            read_bytes(path)
    with pytest.raises(ConfigurationError, match="no such file"):
        read_bytes(tmp_path / "none")
    (tmp_path / "file").write_bytes(b"\xff" * 100)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert len(read_bytes(tmp_path / "link")) == 100
    with pytest.raises(ConfigurationError, match="100 bytes; such a file has at most 50"):
        read_bytes(tmp_path / "file", 50)
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        read_text(tmp_path / "file")
