"""Tables as Markdown and CSV: our accuracies, mean ± standard deviation over seeds, with the paper's beside them."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from lsg.methods import METHODS
from lsg.reproduce.store import Summary
from lsg.train.config import RunConfig

NOT_RUN = "-"
CSV_COLUMNS = ("panel", "task", "model", "method", "rank", "sparsity", "importance", "target_epsilon", "delta")
CSV_RESULTS = ("seeds", "accuracy_mean", "accuracy_std", "paper_accuracy")


@dataclass(frozen=True)
class Entry:
    """A place of a table. ours: None where not run. paper: percent, None where the paper has no number."""

    config: RunConfig
    ours: Summary | None
    paper: float | None


@dataclass(frozen=True)
class Panel:
    """One sub-table: rows of entries, as wide as `columns`."""

    title: str
    corner: str
    columns: tuple[str, ...]
    rows: dict[str, list[Entry]]


def accuracy_text(ours: Summary | None) -> str:
    """Such as "90.4 ± 0.2 (n=3)"."""
    if ours is None:
        return NOT_RUN
    spread = "" if ours.std is None else f" ± {ours.std:.1f}"
    return f"{ours.mean:.1f}{spread} (n={ours.seeds})"


def markdown(title: str, panels: Sequence[Panel], notes: Sequence[str]) -> str:
    """A page: a heading, each panel as a table with ours and the paper's side by side, notes."""
    lines = [f"# {title}", ""]
    for panel in panels:
        header = [panel.corner]
        for column in panel.columns:
            header += [f"{column}, ours", f"{column}, paper"]
        lines += [f"## {panel.title}", "", _row(header), _row(["---", *["---:"] * (len(header) - 1)])]
        for label, entries in panel.rows.items():
            cells = [label]
            for entry in entries:
                cells += [accuracy_text(entry.ours), NOT_RUN if entry.paper is None else f"{entry.paper:.1f}"]
            lines.append(_row(cells))
        lines.append("")
    return "\n".join([*lines, *(f"- {note}" for note in notes)]) + "\n"


def comma_separated(panels: Sequence[Panel]) -> str:
    """One line an entry, for machines; empty where not run or without a number in the paper."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*CSV_COLUMNS, *CSV_RESULTS])
    for panel in panels:
        for entries in panel.rows.values():
            for entry in entries:
                writer.writerow([panel.title, *_settings(entry.config), *_results(entry)])
    return text.getvalue()


def curves_comma_separated(curves: Sequence[tuple[RunConfig, Summary]]) -> str:
    """One line an epoch of each mean curve."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*CSV_COLUMNS[1:], "seeds", "epoch", "accuracy_mean"])
    for config, summary in curves:
        for epoch, accuracy in enumerate(summary.curve, start=1):
            writer.writerow([*_settings(config), summary.seeds, epoch, f"{accuracy:.3f}"])
    return text.getvalue()


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _settings(config: RunConfig) -> list[object]:
    options = METHODS[config.method].options
    return [
        config.task,
        config.model,
        config.method,
        *(getattr(config, option) if option in options else "" for option in ("rank", "sparsity", "importance")),
        "" if config.epsilon is None else config.epsilon,
        config.delta,
    ]


def _results(entry: Entry) -> list[object]:
    ours = entry.ours
    mean = "" if ours is None else f"{ours.mean:.3f}"
    std = "" if ours is None or ours.std is None else f"{ours.std:.3f}"
    return [0 if ours is None else ours.seeds, mean, std, "" if entry.paper is None else entry.paper]
