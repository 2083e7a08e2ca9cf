"""results/recipes/heads.jsonl in: tables for docs/what-helps.md out, the recipe for a head beside other settings."""

import json
from pathlib import Path
from statistics import mean

CELLS = Path(__file__).resolve().parent.parent / "results" / "recipes" / "heads.jsonl"
RECIPE = "recipe"
Cell = tuple[str, str, int, float]  # data, encoder, records, ε


def heads() -> str:
    """Accuracy of the recipe and of the best setting of each cell; then what each setting gains over the recipe."""
    cells: dict[Cell, dict[str, float]] = {}
    for row in map(json.loads, CELLS.read_text().splitlines()):
        cell = (row["data"], row["encoder"], row["records"], row["epsilon"])
        cells.setdefault(cell, {})[row["tried"]] = 100 * mean(row["scores"])
    return f"{_by_cell(cells)}\n\n{_by_setting(cells)}"


def _by_cell(cells: dict[Cell, dict[str, float]]) -> str:
    epsilons = sorted({cell[3] for cell in cells})
    columns = " | ".join(f"ε = {epsilon:g}" for epsilon in epsilons)
    lines = [f"| data, encoder | records | {columns} |", "|---" * (2 + len(epsilons)) + "|"]
    for data, encoder, records in sorted({cell[:3] for cell in cells}):
        found = [cells[data, encoder, records, epsilon] for epsilon in epsilons]
        told = " | ".join(f"{scores[RECIPE]:.1f} ({max(scores.values()):.1f})" for scores in found)
        lines.append(f"| {data}, {encoder} | {records:,} | {told} |")
    return "\n".join(lines)


def _by_setting(cells: dict[Cell, dict[str, float]]) -> str:
    lines = ["| in place of the recipe's | mean gain | least | most |", "|---|---|---|---|"]
    for name in next(iter(cells.values())):
        if name != RECIPE:
            gains = [scores[name] - scores[RECIPE] for scores in cells.values()]
            lines.append(f"| {name} | {mean(gains):+.1f} | {min(gains):+.1f} | {max(gains):+.1f} |")
    return "\n".join(lines)
