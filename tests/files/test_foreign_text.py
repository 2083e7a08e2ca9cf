"""Foreign text goes out so that it can only be read: on a terminal, in a page, in JSON and TOML."""

import json
import tomllib

import pytest

from lsg.files.foreign_text import in_html, in_toml, is_text, listed, to_json, visible, visible_lines
from lsg.files.terminal import Terminal, Words, echo

HARMFUL = "\x1b[31m\x00\x07\r\x7f\x9b\u200b\u202e\u2066\u2028\ufeff\U000e0041\ud83d"


def test_every_harmful_character_is_shown_by_its_number() -> None:
    shown = visible(f"a{HARMFUL}\n\tb")
    assert shown.isprintable() and shown.isascii() and len(shown.splitlines()) == 1
    assert shown.startswith("a\\x1b[31m\\x00") and shown.endswith("\\n\\tb") and "\\u202e" in shown


@pytest.mark.parametrize("text", ["é ε 漢字 עברית", "👩‍💻", "می‌خواهم", "[/] [bold]", "C:\\folder"])
def test_all_other_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text and visible_lines(f"{text}\n{text}") == f"{text}\n{text}"


def test_long_texts_are_cut_in_the_middle_and_long_lists_counted() -> None:
    assert len(visible("x" * 10**6)) <= 2000 and visible("x" * 10**6, 50).count("[...]") == 1
    assert listed(str(n) for n in range(1_000_000)).endswith("'9' and 999,990 more")
    assert listed(["a", "b"]) == "'a', 'b'"


def test_a_name_of_other_bytes_shows_them() -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert visible(name) == "caf\\xe9" and not is_text(name) and is_text("café")


def test_json_holds_what_went_in_but_for_numbers_that_are_not_finite() -> None:
    value = {"a": HARMFUL, "b": [1.5, float("nan"), float("inf")], "é": (1,)}
    text = to_json(value)
    assert json.loads(text) == {"a": HARMFUL, "b": [1.5, None, None], "é": [1]}
    assert not set(HARMFUL) - set("[31m") & set(text) and "é" in text


def test_toml_holds_what_went_in() -> None:
    value = HARMFUL[:-1] + '"\\é\n'
    text = in_toml(value)
    assert tomllib.loads(f"x = {text}")["x"] == value and visible(text) == text


def test_html_holds_no_markup_and_no_override() -> None:
    assert in_html("<b>\u202e'\"") == "&lt;b&gt;\\u202e&#x27;&quot;"


def test_the_terminal_shows_markup_and_controls_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.progress import Progress
    from rich.table import Table

    terminal = Terminal(width=300)
    terminal.print(f"[/] [red]x {HARMFUL}\ny")
    terminal.lines("one\ntwo\x1b[2J")
    table = Table(title="[/]\x1b[1m")
    table.add_column("[/b]")
    table.add_row("[/c]\u202e:smile:")
    terminal.print(table)
    with Progress(Words("{task.description} [/d]"), console=terminal) as bar:
        bar.add_task("[/e]\x1b[2J")
    echo("[/f]\x1b[2J")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\u202e" not in shown and "one\ntwo\\x1b[2J\n" in shown
    for text in ("[/] [red]x \\x1b[31m", "\\ny", "[/b]", "[/c]\\u202e:smile:", "[/e]\\x1b[2J [/d]", "[/f]\\x1b"):
        assert text in shown
