"""results/emails in, two tables for docs/train.md out: perplexity and exposure of fine-tuned language models."""

import json
from pathlib import Path
from typing import Any

CELLS = Path(__file__).resolve().parent.parent / "results" / "emails" / "cells.jsonl"
METHODS = {"lsg": "LSG(8, 0.5)", "rgp": "RGP(8)", "lora": "LoRA of rank 8, by DPSGD"}
UNITS, EPSILONS = ("message", "sender"), (1.0, 3.0, 8.0)


def emails() -> str:
    """Perplexity on held-out senders, then exposure of planted secrets, then the learning rates that were tried."""
    rows = [json.loads(line) for line in CELLS.read_text().splitlines()]
    tuning = [row for row in rows if row["cell"]["validation"]]
    found = {_key(row): row for row in rows if not row["cell"]["validation"]}
    columns = " | ".join(f"ε = {epsilon:g} a {unit}" for unit in UNITS for epsilon in EPSILONS)
    parts = []
    for title, told in (("perplexity", _perplexity), ("exposure, bits", _exposure)):
        lines = [f"| {title} | without privacy | {columns} |", "|---" * (2 + len(UNITS) * len(EPSILONS)) + "|"]
        bare = told(found["non-private", "message", 3.0])
        for number, (method, name) in enumerate(METHODS.items()):
            private = " | ".join(told(found[method, unit, epsilon]) for unit in UNITS for epsilon in EPSILONS)
            lines.append(f"| {name} | {bare if number == 0 else ''} | {private} |")
        parts.append("\n".join(lines))
    parts.append(_tried(tuning))
    as_it_was = _perplexity(found["untrained", "message", None])
    parts.append(f"The model as it was, before any training: perplexity {as_it_was}.")
    return "\n\n".join(parts)


def _key(row: dict[str, Any]) -> tuple[str, str, float | None]:
    cell = row["cell"]
    return cell["method"], cell["unit"], cell["epsilon"]


def _perplexity(row: dict[str, Any]) -> str:
    return f"{row['perplexity']:.1f}"


def _exposure(row: dict[str, Any]) -> str:
    return f"{row['mean_exposure_bits']:.2f} ± {row['standard_error']:.2f}"


def _tried(tuning: list[dict[str, Any]]) -> str:
    """Each method's rates and what they gave on a part of the training data that was held out of it."""
    lines = ["| rates tried at ε = 3 a message | perplexity on held-out training data |", "|---|---|"]
    names: dict[str, str] = {**METHODS, "non-private": "without privacy"}
    for method, name in names.items():
        own = [row for row in tuning if row["cell"]["method"] == method]  # in the order of their rates
        rates = ", ".join(f"{row['cell']['lr']:g}" for row in own)
        lines.append(f"| {name}: {rates} | {', '.join(_perplexity(row) for row in own)} |")
    return "\n".join(lines)
