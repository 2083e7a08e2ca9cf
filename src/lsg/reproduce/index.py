"""The README of a reproduction's folder: what was run and what not, by which command, and where each file is."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError
from lsg.files.atomic import write_atomic
from lsg.files.foreign_text import to_json
from lsg.reproduce.grid import Failure, pending, with_seeds
from lsg.reproduce.scales import Scale
from lsg.reproduce.store import Store, cell_name
from lsg.reproduce.studies import Study


def write_index(
    folder: Path,
    scale: Scale,
    studies: Iterable[Study],
    store: Store,
    *,
    seeds: int,
    failures: Sequence[Failure],
    origin: Mapping[str, Any],
) -> Path:
    """Describes the whole folder, with what earlier commands left there. origin: the provenance of this command."""
    lines = [f"# `lsg reproduce` at scale `{scale.name}`", "", f"What it is: {scale.about}.", ""]
    lines += [f"Last command: `{_without_paths(origin['command'])}`, {seeds} seed(s), {origin['time_utc']}.", ""]
    lines += ["| study | cells complete | files |", "|---|---:|---|"]
    missing: dict[str, None] = {}
    for study in studies:
        cells = with_seeds(study.configs, seeds)
        try:
            waiting = pending(cells, store)
            missing |= dict.fromkeys(cell_name(cell) for cell in waiting)
            count = f"{len(cells) - len(waiting)} of {len(cells)}"
        except ConfigurationError:
            count = "made with other settings"
        files = sorted(path.name for path in folder.glob(f"{study.name}*") if path.is_file())
        links = ", ".join(f"[{name}]({name})" for name in files) or "not rendered"
        lines.append(f"| {study.name}: {study.title} | {count} | {links} |")
    lines += [
        "",
        "Each folder in [cells](cells) is one training run: its settings, metrics, privacy statement, result.",
    ]
    lines += _listed("Failed", [f"{failure.name}: {failure.reason}" for failure in failures])
    lines += _listed("Not run", list(missing))
    details = {key: value for key, value in origin.items() if key not in ("command", "time_utc")}
    lines += ["", "## Provenance of this command", "", "```json", to_json(details, indent=2), "```"]
    path = folder / "README.md"
    write_atomic(path, "\n".join(lines) + "\n")
    return path


def _without_paths(command: str) -> str:
    """Absolute paths hold names of people and machines, and this file is made to be published."""
    return re.sub(r"(^|[\s='\"])[/~][^\s'\"]*", r"\1PATH", command)


def _listed(title: str, items: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *(f"- {item}" for item in items)] if items else []
