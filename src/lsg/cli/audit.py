"""`lsg audit`: attacks the engine and says whether the epsilon it claims can be true."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table
from rich.text import Text

from lsg.audit.settings import CLIPPINGS, MODES, AuditSettings
from lsg.cli.audit_secrets import SECRETS, audit_secrets_command
from lsg.cli.errors import FAILED
from lsg.files.atomic import make_folder, write_atomic
from lsg.files.foreign_text import to_json
from lsg.files.sign_of_life import doing
from lsg.files.terminal import Terminal, echo
from lsg.methods import PRIVATE_METHODS, Clipping
from lsg.train.provenance import provenance

if TYPE_CHECKING:
    from lsg.audit.report import Audit

DEFAULTS = AuditSettings()


def audit(
    context: typer.Context,
    mode: Annotated[str, typer.Option(help=f"One of {', '.join(MODES)}.")] = DEFAULTS.mode,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(PRIVATE_METHODS)}.")] = DEFAULTS.method,
    clipping: Annotated[str, typer.Option(help=f"One of {', '.join(CLIPPINGS)}.")] = DEFAULTS.clipping,
    epsilon: Annotated[float, typer.Option(help="What the engine is told to claim.")] = DEFAULTS.epsilon,
    delta: Annotated[float, typer.Option(help="At this delta.")] = DEFAULTS.delta,
    trials: Annotated[int, typer.Option(help="White box: releases with and without canaries.")] = DEFAULTS.trials,
    steps: Annotated[int, typer.Option(help="White box: also runs of so many steps; 1: none.")] = DEFAULTS.steps,
    canaries: Annotated[
        int | None,
        typer.Option(help=f"One run: how many ({DEFAULTS.canaries}). With --config: so many secrets ({SECRETS})."),
    ] = None,
    epochs: Annotated[int, typer.Option(help="One run: how long to train.")] = DEFAULTS.epochs,
    seeds: Annotated[int, typer.Option(help="Repeat with so many seeds.")] = DEFAULTS.seeds,
    confidence: Annotated[
        float, typer.Option(help="An intact engine passes with this probability, all seeds together.")
    ] = DEFAULTS.confidence,
    records_per_unit: Annotated[
        int, typer.Option(help="Canaries are units of so many records of one id: whole persons, say.")
    ] = DEFAULTS.records_per_unit,
    views: Annotated[int, typer.Option(help="And so many views of each record.")] = DEFAULTS.views,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Settings of lsg train --task generate, such as a run's config.toml: random secrets are put into its "
            "data, and what models trained with and without privacy expose of them is measured."
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for audit.json and figure.png.")] = Path("runs/audit"),
) -> None:
    """Attack the engine with canaries: a lower bound on epsilon, to be held against the epsilon it claims."""
    if config is not None:
        audit_secrets_command(context, config, canaries, output)
        return
    console = Terminal()
    settings = AuditSettings(
        mode=mode,
        method=method,
        clipping=cast(Clipping, clipping),
        epsilon=epsilon,
        delta=delta,
        trials=trials,
        steps=steps,
        canaries=DEFAULTS.canaries if canaries is None else canaries,
        epochs=epochs,
        seeds=seeds,
        confidence=confidence,
        records_per_unit=records_per_unit,
        views=views,
    )
    make_folder(output)  # before the work: one that cannot be made costs none
    from lsg.audit.report import audit as run_audit  # with PyTorch, for which errors of usage need not wait
    from lsg.audit.report import violations

    with console.status("") as status, doing(lambda: f"auditing, {status.status}"):
        audits = run_audit(settings, on_part=status.update)
    console.print(_table(audits, settings))
    if any(one.one_run for one in audits):
        console.print("One-run bounds are loose: they find gross mistakes only.", style="dim")
    broken = violations(audits)
    _write(output, settings, audits, broken)
    console.print(f"Wrote {output / 'audit.json'} and {output / 'figure.png'}", soft_wrap=True)
    for message in broken:
        echo(f"VIOLATION: {message}")
    if broken:
        raise typer.Exit(FAILED)
    echo("consistent: nothing contradicts the claim")


def _table(audits: list[Audit], settings: AuditSettings) -> Table:
    table = Table(
        title=f"{settings.method}, {settings.clipping} clipping{_units(settings)}: bounds that all hold together with "
        f"{settings.confidence:.3%}"
    )
    for column in ("seed", "attack", "sensitivity", "ε claimed", "ε at least", "verdict"):
        table.add_column(column, justify="left" if column in ("attack", "verdict") else "right")
    for one in audits:
        for part in one.white_box:
            for o in part.observed:
                broken = any(f"canary {o.canary} " in message for message in part.violations)
                numbers = (f"{o.sensitivity.largest:.4f} C", f"{part.claimed:.3f}", f"{o.bounds.epsilon:.3f}")
                table.add_row(str(one.seed), f"canary {o.canary}", *numbers, _verdict(broken))
        if one.batches is not None:
            attack = f"{one.batches.steps} batches"
            table.add_row(str(one.seed), attack, "", "", "", _verdict(bool(one.batches.violations)))
        if one.one_run is not None:
            run = one.one_run
            attack = f"one run, {run.correct} of {run.guesses} right"
            numbers = ("", f"{run.claimed:.3f}", f"{run.bound:.3f}")
            table.add_row(str(one.seed), attack, *numbers, _verdict(bool(run.violations)))
    return table


def _units(settings: AuditSettings) -> str:
    """What is added or removed, where that is more than a record."""
    if settings.records_per_unit == settings.views == 1:
        return ""
    return f", units of {settings.records_per_unit} records in {settings.views} views"


def _verdict(broken: bool) -> Text:
    return Text("VIOLATION", "bold red") if broken else Text("consistent")


def _write(output: Path, settings: AuditSettings, audits: list[Audit], broken: list[str]) -> None:
    from lsg.audit.plot import save_audit_figure  # matplotlib takes a second, which --help need not

    document: dict[str, Any] = {
        "provenance": provenance(),
        "plan": dataclasses.asdict(settings),
        "verdict": "VIOLATION" if broken else "consistent",
        "violations": broken,
        "audits": [one.as_json() for one in audits],
    }
    write_atomic(output / "audit.json", to_json(document, indent=1) + "\n")
    title = f"{settings.method}, {settings.clipping} clipping, seed {audits[0].seed}"
    save_audit_figure(output / "figure.png", audits[0], title=title)
