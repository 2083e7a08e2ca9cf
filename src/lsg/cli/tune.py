"""`lsg tune`: what `lsg train` takes and settings to vary in, the best settings out, and what finding them has cost."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn
from rich.table import Table

from lsg.accounting.selection import DRAWS
from lsg.cli.known_settings import check_usage
from lsg.cli.run_options import options_of_runs
from lsg.errors import ConfigurationError
from lsg.files.terminal import Terminal, Words
from lsg.tasks.measures import ACCURACY, MEASURES, Measure
from lsg.train.config import RunConfig
from lsg.train.config_file import read_settings
from lsg.train.listener import Listener, RunStart
from lsg.tune.candidates import read_variations, usual_variations
from lsg.tune.listener import Outcome, SearchListener
from lsg.tune.search import SCORED_SHARE, Search


def tune(
    output: Path,
    config: Path | None = None,
    resume: bool = False,
    public_data: str | None = None,
    held_out: float | None = None,
    runs: int | None = None,
    draw: str | None = None,
    shrink: int | None = None,
    vary: list[str] | None = None,
    **given: Any,
) -> None:
    """Find settings for lsg train: on public data, on a part set aside, or on the data themselves, and pay for it.

    Without --public-data and --held-out the search runs on the private data, and --epsilon covers all of it: every run,
    the choice, and the model that comes out. Options of lsg train are what the search starts from.
    """
    console = Terminal()
    own = {"public_data": public_data, "held_out": held_out, "runs": runs, "draw": draw, "shrink": shrink}
    own = {key: value for key, value in own.items() if value is not None}
    given = {key: value for key, value in given.items() if value is not None}
    search = None
    if resume:
        if own or given or vary or config is not None:
            raise ConfigurationError("--resume goes on with what was drawn: give --output alone")
    else:
        base = _base(output, config, given, held_out, _Notes(console))
        search = Search(base, read_variations(vary) if vary else usual_variations(base), **own)  # type: ignore[arg-type]
    _show(console, _searched(console, search, output, resume), output)


def _base(
    output: Path, config: Path | None, given: dict[str, Any], held_out: float | None, listener: Listener
) -> RunConfig:
    """What `lsg train` would do with those records that are not scored on, or not set aside."""
    own = ({} if config is None else read_settings(config)) | given
    apart = {"tuning_part": held_out} if held_out else {"validation": own.get("validation") or SCORED_SHARE}
    check_usage(output, config, False, given | apart)
    from lsg.cli.run_settings import run_settings  # with PyTorch, for which help and errors of usage need not wait

    found = run_settings(output, config, False, given | apart, listener)
    return replace(found, tuning_part=own.get("tuning_part"), validation=own.get("validation", 0.0))


def _searched(console: Terminal, search: Search | None, output: Path, resume: bool) -> Outcome:
    bar = Progress(
        Words("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        Words("ETA of this run"),
        TimeRemainingColumn(compact=True),
        console=console,
    )
    from lsg.tune.tune import tune as search_for  # with PyTorch, for which help and errors of usage need not wait

    try:
        return search_for(search, output, resume=resume, listener=_Bar(bar, console))
    except KeyboardInterrupt:
        begun = (output / "search.json").is_file()
        told = f" Go on with: lsg tune --resume --output {output}" if begun else " Nothing was written."
        console.print(f"Stopped.{told}", soft_wrap=True)
        raise
    finally:
        if bar.live.is_started:
            bar.stop()


class _Notes(Listener):
    """Prints what is told before the search begins: the recipe that it starts from."""

    def __init__(self, console: Terminal) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.lines(text, style="dim")


class _Bar(SearchListener):
    """The run that is going on as a bar, a line for each that is done."""

    def __init__(self, bar: Progress, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bar, self._label, self._settings = bar, "", ""
        self._task: TaskID | None = None
        self._noted: set[str] = set()

    def note(self, text: str) -> None:
        if text not in self._noted:  # every run tells of the same data and model
            self._noted.add(text)
            self._terminal.lines(text, style="dim")

    def begins(self, number: int, runs: int, settings: str) -> None:
        self._label, self._settings = f"run {number} of {runs}", settings

    def started(self, start: RunStart) -> None:
        self._bar.start()
        self._task = self._bar.add_task(self._label, total=start.steps, completed=start.steps_done)

    def step(self, done: int) -> None:
        assert self._task is not None
        self._bar.update(self._task, completed=done)

    def ended(self, number: int, score: float, measure: Measure) -> None:
        if self._task is not None:  # a run that was done before shows no bar
            self._bar.remove_task(self._task)
            self._task = None
        line = f"{self._label}: {measure.labelled(score)}, {self._settings}"
        self._terminal.print(line, soft_wrap=True)


def _show(console: Terminal, outcome: Outcome, output: Path) -> None:
    table = Table(title="Tried (secret)")
    measure = MEASURES.get(outcome.measure, ACCURACY)
    for column in ("run", "score" if measure is ACCURACY else f"{measure.name} (lower is better)", "settings"):
        table.add_column(column, justify="left" if column == "settings" else "right")
    for number, (score, settings) in enumerate(zip(outcome.scores, outcome.tried, strict=True), start=1):
        style = "bold green" if number == outcome.best else None
        table.add_row(str(number), measure.text(score), settings, style=style)
    console.print(table)
    console.lines(outcome.cost)
    if outcome.statement is not None:
        console.print(outcome.statement, soft_wrap=True)
        kept = "model/ and privacy.json (to release), tuned.toml (the settings)"
    else:
        kept = f"tuned.toml. Train with it: lsg train --config {output / 'tuned.toml'} --output FOLDER"
    console.print(f"{output}: {kept}", style="dim", soft_wrap=True)


_OWN = (
    ("output", Path, ..., typer.Option(help="Folder for the settings, and of a paid search the model.")),
    ("config", Path | None, None, typer.Option(help="A TOML or YAML file of settings to start from.")),
    ("resume", bool, False, typer.Option("--resume", help="Go on with the search that --output holds.")),
    ("public_data", str | None, None, typer.Option(help="Search on these data, which are no secret: costs nothing.")),
    (
        "held_out",
        float | None,
        None,
        typer.Option(help="Search on this share of the data, which gets no guarantee and is not trained on."),
    ),
    (
        "vary",
        list[str] | None,
        None,
        typer.Option("--try", help="A setting and its values: --try lr=0.1,0.2. Repeat it."),
    ),
    ("runs", int | None, None, typer.Option(help="So many runs; of a paid search, on average.  [default: 5]")),
    ("draw", str | None, None, typer.Option(help=f"Of a paid search, the number of runs: {' or '.join(DRAWS)}.")),
    (
        "shrink",
        int | None,
        None,
        typer.Option(help="Batches so many times smaller, with the same noise-to-batch ratio."),
    ),
)
tune.__signature__ = inspect.Signature(options_of_runs(_OWN))  # type: ignore[attr-defined]
tune.__annotations__ = {parameter.name: parameter.annotation for parameter in options_of_runs(_OWN)}
