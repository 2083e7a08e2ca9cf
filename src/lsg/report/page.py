"""The page itself: runs in, HTML out. Tables are plain HTML; the script draws the charts and sorts.

Runs are untrusted: every text from them is escaped, the charts' JSON cannot end its script element, and the page's
policy lets no script run but its own, whose hash it names, and lets nothing be fetched.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from lsg import __version__
from lsg.accounting.rounding import epsilon_text
from lsg.files.foreign_text import in_html as escape
from lsg.files.foreign_text import in_script
from lsg.report.charts import make_charts
from lsg.report.runs import StoredRun
from lsg.report.settings import Section, as_text, make_sections, method_text, short_model, varying

# Shown in columns of their own, or made of the columns shown.
_NAMED = ("task", "model", "method", "rank", "sparsity", "importance", "epsilon", "seed")


def render(runs: Sequence[StoredRun], title: str) -> str:
    """The whole document, ready to be written to a file."""
    sections = make_sections(runs)
    style, script = _part("page.css"), _part("page.js")
    charts = [make_charts(section) for section in sections]
    parts = {
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'",
        "style": style,
        "script": script,
        "title": escape(title),
        "about": _about(runs),
        "settings": "".join(_settings_table(section) for section in sections),
        "charts": "".join(
            f'<section><h3>{escape(section.title)}</h3><div class="charts" data-section="{i}"></div></section>'
            for i, section in enumerate(sections)
        ),
        "runs": _runs_table(runs),
        "details": "".join(_details(number, run) for number, run in enumerate(runs)),
        "data": in_script(charts),
        "version": escape(__version__),
    }
    # In one pass, so that nothing that is put in is looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html"))


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _about(runs: Sequence[StoredRun]) -> str:
    incomplete, warned = sum(not run.complete for run in runs), sum(bool(run.warnings) for run in runs)
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}" + (f", {incomplete} incomplete" if incomplete else "")
    return escape(count + (f", {warned} with warnings (below, with each run's privacy)" if warned else ""))


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """number: what it is sorted by; None: by its text. link: a place on this page."""

    text: str
    number: float | None = None
    link: str = ""

    def html(self, tag: str, kind: str) -> str:
        inside = f'<a href="#{escape(self.link)}">{escape(self.text)}</a>' if self.link else escape(self.text)
        scope = ' scope="row"' if tag == "th" else ""
        sort = "" if self.number is None else f' data-sort="{self.number!r}"'
        return f"<{tag}{scope}{kind}{sort}>{inside}</{tag}>"


def _number(value: float | None, text: str) -> Cell:
    return Cell("—" if value is None else text, value)


def _epsilon(epsilon: float | None) -> Cell:
    return Cell(epsilon_text(epsilon), 1e308 if epsilon is None else epsilon)


def _setting(value: Any) -> Cell:
    """A value out of a configuration."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell("—" if value is None else as_text(value), value if numeric else None)


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """The first cell of a row is its name. A column with numbers is set as numbers."""
    kinds = [
        ' class="number"' if any(c.number is not None for c in column) else "" for column in zip(*rows, strict=True)
    ]
    columns = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    tags = ["th"] + ["td"] * (len(head) - 1)
    lines = ""
    for row in rows:
        lines += f"<tr>{''.join(map(Cell.html, row, tags, kinds))}</tr>"
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table class="sortable">'
        f"<caption>{escape(caption)}</caption><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _settings_table(section: Section) -> str:
    rows = []
    for setting in section.settings:
        mean, std = setting.mean, setting.std
        spread = "" if std is None else f" ± {section.measure.shown(std):.2f}"
        seeds = ", ".join(as_text(run.config.get("seed")) for run in setting.runs)
        rows.append(
            [
                Cell(setting.label),
                _epsilon(setting.epsilon),
                _number(mean, f"{section.measure.shown(mean or 0):.2f}{spread}"),
                _setting(len(setting.runs)),
                Cell(seeds),
            ]
        )
    head = ("setting", "ε spent", f"{section.measure.heading}, mean ± std", "runs", "seeds")
    return _table(section.title, head, rows)


def _runs_table(runs: Sequence[StoredRun]) -> str:
    """Columns: what every reader wants, and the settings that are not the same in all runs."""
    differing = [key for key in varying([run.config for run in runs]) if key not in _NAMED]
    score = " or ".join(dict.fromkeys(run.measure.heading for run in runs))
    head = ("run", "state", "task", "model", "method", *differing, "seed", "ε spent", "δ", score)
    rows = []
    for number, run in enumerate(runs):
        config = run.config
        rows.append(
            [
                Cell(run.name, link=f"run-{number}"),
                Cell("complete" if run.complete else "incomplete"),
                Cell(as_text(config.get("task"))),
                Cell(short_model(as_text(config.get("model")))),
                Cell(method_text(config)),
                *(_setting(config.get(key)) for key in differing),
                _setting(config.get("seed")),
                _epsilon(run.epsilon),
                _setting(None if run.epsilon is None else config.get("delta")),  # no ε, no δ
                _number(run.score, f"{run.measure.shown(run.score or 0):.2f}"),
                _number(run.loss, f"{run.loss or 0:.4f}"),
                _number(run.seconds, f"{run.seconds or 0:,.1f}"),
            ]
        )
    return _table("All runs", (*head, "loss (not private)", "seconds"), rows)


# --- details of a run -------------------------------------------------------------------------------------------------


def _details(number: int, run: StoredRun) -> str:
    statement = run.privacy.get("statement")
    caveats = run.privacy.get("caveats")
    numbers = {key: value for key, value in run.privacy.items() if key not in ("statement", "caveats", "warnings")}
    body = [f'<p class="warning">Warning: {escape(warning)}</p>' for warning in run.warnings]
    body += [f"<p>{escape(str(statement))}</p>" if statement else f"<p>{escape(_no_statement(run))}</p>"]
    if isinstance(caveats, list) and caveats:
        body.append(f"<ul>{''.join(f'<li>{escape(str(caveat))}</li>' for caveat in caveats)}</ul>")
    scores = {part: run.measure.text(score) for part, score in run.scores.items()}
    for heading, values in (
        (f"{run.measure.name.capitalize()} by part", scores),
        ("Privacy", numbers),
        ("Configuration", run.config),
        ("Provenance", run.provenance),
    ):
        if values:
            body.append(f"<h4>{heading}</h4>{_definitions(values)}")
    count = len(run.warnings)
    state = "" if run.complete else " (incomplete)"
    state += f" · {count} warning{'s' if count != 1 else ''}" if count else ""
    return f'<details id="run-{number}"><summary>{escape(run.name)}{state}</summary>{"".join(body)}</details>'


def _no_statement(run: StoredRun) -> str:
    return "No privacy statement yet: the run is not complete." if not run.complete else "No privacy statement."


def _definitions(values: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{_value(value)}</td></tr>' for key, value in values.items()
    )
    return f'<div class="scroll"><table class="plain"><tbody>{rows}</tbody></table></div>'


def _value(value: Any) -> str:
    """To the last digit: an ε must not look smaller here than it is."""
    if isinstance(value, dict):
        return "<br>".join(f"{escape(str(key))}: {_value(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return escape("none" if value is None else str(value))
