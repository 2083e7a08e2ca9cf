"""results/recipes/defaults.jsonl in: a table for docs/what-helps.md out, what `lsg train` gives if nothing is set."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RUNS = Path(__file__).resolve().parent.parent / "results" / "recipes" / "defaults.jsonl"
DATA = {"text": "SST-2's first sentences, MiniLM", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}


def defaults() -> str:
    """A row for each task and what was trained: accuracy, seeds, time on the CPU."""
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in map(json.loads, RUNS.read_text().splitlines()):
        config = run["config"]
        trained = config["trainable"] if config["task"] == "text" else config["model"]
        runs.setdefault((config["task"], run["privacy"]["records"], config["epsilon"], trained), []).append(run)
    lines = ["| data | records | ε | trained | % (seeds) | training, CPU |", "|---|---|---|---|---|---|"]
    for (task, records, epsilon, trained), found in sorted(runs.items()):
        scores = [100 * run["score"] for run in found]
        spread = f" ± {stdev(scores):.1f}" if len(scores) > 1 else ""
        seconds = mean(run["seconds"] for run in found)
        lines.append(
            f"| {DATA[task]} | {records:,} | {epsilon:g} | {trained} | {mean(scores):.1f}{spread} ({len(scores)}) | "
            f"{seconds:,.0f} s |"
        )
    return "\n".join(lines)
