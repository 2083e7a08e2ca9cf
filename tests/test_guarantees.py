"""docs/guarantees.md: every assumption names a test that exists, and nothing that matters is left out."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`")


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose first heading this is."""
    found = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert found, f"no table headed {heading!r}"
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found[1].splitlines()]


@pytest.mark.parametrize("row", table("assumption"), ids=lambda row: row[0])
def test_each_assumption_names_tests_that_exist(row: list[str]) -> None:
    named = NAMED.findall(row[1])
    assert named
    for file, test in named:
        tree = ast.parse((ROOT / (file or "tests/test_privacy_rules.py")).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def test_threats_that_are_not_covered_are_named_with_what_to_do() -> None:
    rows = table("threat")
    assert all(len(row) == 3 and all(row) for row in rows)
    text = " ".join(" ".join(row) for row in rows).lower()
    for word in ("learning rate", "metrics", "evaluation", "seed", "floating point", "side channel", "checkpoint"):
        assert word in text, word


def test_hard_words_are_in_the_glossary() -> None:
    words = " ".join(row[0] for row in table("word"))
    for word in ("accountant", "clipping", "composition", "neighbours", "Poisson", "post-processing", "sensitivity"):
        assert word in words
        assert word.lower() in PAGE.lower().replace("## glossary", "", 1)


def test_sentences_are_short() -> None:
    prose = re.sub(r"^(?:\||#).*$", "", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL), flags=re.MULTILINE)
    sentences = re.split(r"(?<=[.:?])\s+", prose)
    lengths = [len(sentence.split()) for sentence in sentences if sentence.strip()]
    assert sum(lengths) / len(lengths) < 15 and max(lengths) < 45
