"""`lsg audit --config`: random secrets in a language model's training data, and how far it exposes them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.status import Status
from rich.table import Table

from lsg.cli.errors import FAILED
from lsg.cli.known_settings import check_usage
from lsg.errors import ConfigurationError
from lsg.files.atomic import make_folder, write_atomic
from lsg.files.foreign_text import to_json
from lsg.files.sign_of_life import doing
from lsg.files.terminal import Terminal, echo
from lsg.train.listener import Listener, RunStart
from lsg.train.provenance import provenance

if TYPE_CHECKING:
    from lsg.audit.planted_secrets import Exposed

SECRETS, LEAST, MOST = 50, 20, 10_000
OPTIONS = ("config", "canaries", "output")  # of `lsg audit`; the others attack the engine


def audit_secrets_command(context: typer.Context, config: Path, canaries: int | None, output: Path) -> None:
    """Train what the file says with and without privacy, on its data and secrets; print and write what is exposed."""
    for name in context.params:
        if name not in OPTIONS and context.get_parameter_source(name).name == "COMMANDLINE":  # type: ignore[union-attr]
            raise ConfigurationError(
                f"--{name.replace('_', '-')} attacks the engine, and --config a language model: leave one of them out"
            )
    planted = SECRETS if canaries is None else canaries
    if not LEAST <= planted <= MOST:
        raise ConfigurationError(f"--canaries {planted} must be between {LEAST} and {MOST:,}")
    # A seed of its own: with that of a run whose model was released, both would have the same noise.
    given = {"seed": secrets.randbits(63)}
    check_usage(output, config, False, given)
    console = Terminal()
    make_folder(output)  # before the work: one that cannot be made costs none
    from lsg.audit.planted_secrets import audit_secrets, limits  # with PyTorch, for which errors of usage need not wait
    from lsg.audit.plot import save_exposure_figure
    from lsg.cli.run_settings import run_settings

    with console.status("") as status, doing(lambda: f"auditing, {status.status}"):
        listener = _Shown(console, status)
        settings = run_settings(output, config, False, given, listener)
        found = audit_secrets(settings, planted, output, listener, on_part=listener.begins)
    console.print(_table(found))
    violations = [one.violation for one in found if one.violation]
    document = {
        "provenance": provenance(),
        "about": "NOT PRIVATE: a model without privacy has seen the data",
        "settings": {key: value for key, value in settings.to_dict().items() if key != "seed"},
        "verdict": "VIOLATION" if violations else "consistent",
        "violations": violations,
        "models": [one.as_json() for one in found],
    }
    write_atomic(output / "audit.json", to_json(document, indent=1) + "\n", secret=True)
    save_exposure_figure(output / "figure.png", found, title=f"{planted} random secrets in the training data")
    console.print(f"Wrote {output / 'audit.json'} and {output / 'figure.png'} (not private)", soft_wrap=True)
    for message in violations:
        echo(f"VIOLATION: {message}")
    if violations:
        raise typer.Exit(FAILED)
    for limit in limits(found):
        echo(f"Note: {limit}")
    echo("consistent: nothing contradicts the claim")


def _table(found: list[Exposed]) -> Table:
    from lsg.audit.exposure import BY_CHANCE

    title = f"Exposure of {len(found[0].bits)} random secrets, in bits"
    table = Table(title=f"{title}: {BY_CHANCE:.2f} on average by chance, 10 at most")
    for column in ("model", "ε claimed", "perplexity", "mean exposure", "ε allows", "most exposed"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for one in found:
        table.add_row(
            one.model,
            "-" if one.epsilon is None else f"{one.epsilon:.3f}",
            "-" if one.perplexity is None else f"{one.perplexity:.2f}",
            f"{one.mean:.2f} ± {one.error:.2f}",
            "-" if one.allowed is None else f"{one.allowed:.2f}",
            f"{float(one.bits.max()):.2f}",
        )
    return table


class _Shown(Listener):
    """Prints what is told of data and settings, and keeps a line that says what goes on."""

    def __init__(self, console: Terminal, status: Status) -> None:
        self._console, self._status = console, status
        self._part, self._steps = "", 0
        self._noted: set[str] = set()

    def begins(self, part: str) -> None:
        self._part = part
        self._status.update(part)

    def note(self, text: str) -> None:
        if text not in self._noted:  # both trainings tell of the same data and model
            self._noted.add(text)
            self._console.lines(text, style="dim")

    def warning(self, text: str) -> None:
        self._console.lines(f"{self._part}: {text}", style="yellow")

    def started(self, start: RunStart) -> None:
        self._steps = start.steps

    def step(self, done: int) -> None:
        self._status.update(f"{self._part}: step {done:,} of {self._steps:,}")
