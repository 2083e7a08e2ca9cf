"""Foreign text goes out, foreign files come in, through one place each: no print and no parser stands beside them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_untrusted import called

SOURCE = Path(__file__).parents[1] / "src" / "lsg"
# The rooms themselves, and what may use a module in one way that is not a reader's or a printer's.
ALLOWED = {
    "files/foreign_text.py": {"json", "html", "print"},
    "files/foreign_values.py": {"json", "tomllib", "yaml", "csv"},
    "files/terminal.py": {"print", "rich.console"},
    "checkpoint.py": {"json.dumps"},  # its bytes stand under a checksum
    "accounting/ledger.py": {"json.dumps"},  # as do these
    "reproduce/tables.py": {"csv.writer"},  # numbers of our own
}
PARSERS = {"json", "tomllib", "yaml", "csv", "html", "plistlib", "configparser", "xml", "ast"}
PRINTERS = {"print", "sys.stdout.write", "sys.stderr.write", "typer.echo", "typer.secho", "click.echo", "pprint.pprint"}
TEXT_FILES = {"read_text", "write_text"}


def beside(source: str) -> Iterator[str]:
    """What prints, parses, or reads and writes text in the locale's encoding."""
    uses = {name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and (name := called(node))}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PARSERS:
                    used = {name for name in uses if name.split(".")[0] == alias.name}
                    yield from used or {alias.name}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in PARSERS and [alias.name for alias in node.names] != ["JSONDecodeError"]:
                yield module
            if module == "rich.console" and any(alias.name == "Console" for alias in node.names):
                yield module
            if module == "rich" and any(alias.name == "print" for alias in node.names):
                yield "rich.print"
        elif isinstance(node, ast.Call):
            name = called(node) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
            if name in PRINTERS:
                yield name
            given = {keyword.arg for keyword in node.keywords}
            last = name.rpartition(".")[2]
            if last in TEXT_FILES and "encoding" not in given and isinstance(node.func, ast.Attribute):
                yield f"{last} without encoding"
            if last == "open" and not name.startswith(("os.", "Image.", "gzip.")) and "encoding" not in given:
                modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                if not any("b" in mode for mode in modes):
                    yield "open without encoding"


def test_no_print_and_no_parser_stands_beside_the_two_places() -> None:
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        name = str(file.relative_to(SOURCE))
        allowed = ALLOWED.get(name, set())
        faults = {
            what for what in beside(file.read_text()) if what not in allowed and what.split(".")[0] not in allowed
        }
        if faults:
            found[name] = faults
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "print(text)",
        "import typer\ntyper.echo(text)",
        "from rich.console import Console",
        "from rich import print",
        "import json\njson.loads(text)",
        "import json\njson.dumps(text)",
        "from json import load",
        "import yaml",
        "def f():\n    import tomllib",
        "import csv\ncsv.reader(file)",
        "from html import escape",
        "import sys\nsys.stderr.write(text)",
        "path.read_text()",
        "(folder / name).write_text(text)",
        "open(path)",
        "path.open('w')",
    ],
)
def test_the_search_finds_each_of_them(line: str) -> None:
    assert list(beside(line))


def test_the_search_lets_other_lines_pass() -> None:
    assert not list(beside("from json import JSONDecodeError\npath.read_text(encoding='utf-8')\nopen(path, 'rb')\n"))
