"""`lsg reproduce`: the paper's tables and figures, one command each. Stopped at any time, it goes on where it was."""

import contextlib
import fnmatch
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from lsg.errors import ConfigurationError
from lsg.files.atomic import make_folder
from lsg.files.terminal import Terminal, Words, echo
from lsg.reproduce.grid import Failure, failure_reason, pending, run_cells, with_seeds
from lsg.reproduce.store import Store, cell_name
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.provenance import provenance

if TYPE_CHECKING:
    from lsg.reproduce.studies import Study, Summaries

ALL = "all"


def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            metavar="STUDY",
            help="table1, table2, figure-weights, figure-epsilon, figure-convergence, negatives or all.",
        ),
    ],
    scale: Annotated[str, typer.Option(help="paper, gpu-hour or cpu-minutes.")],
    output: Annotated[Path | None, typer.Option(help="Default: runs/reproduce/SCALE.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each cell; default: the scale's.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="TASK=PATH, repeatable; TASK may be text or image for all of a kind.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="TASK=MODEL, a folder, hub id or zoo name, repeatable; as --data.")
    ] = None,
    only: Annotated[str, typer.Option(help="Run only the cells whose names match, such as 'sst2-lsg-*'.")] = "*",
    layer: Annotated[
        str, typer.Option(help="figure-weights: a weight's name; default: the first of the largest.")
    ] = "",
) -> None:
    """Run what is missing of a table's or figure's runs, then render it with the paper's numbers beside ours."""
    # These bring matplotlib and the tasks' readers, which --help need not wait for.
    from lsg.reproduce.index import write_index
    from lsg.reproduce.intensity import Intensity, run_intensity
    from lsg.reproduce.scales import scale as scale_named
    from lsg.reproduce.studies import studies
    from lsg.train.run import run

    console = Terminal()
    chosen_scale = scale_named(scale).using(_pairs("--data", data), _pairs("--model", model))
    folder = output or Path("runs/reproduce") / scale
    store = Store(folder / "cells")

    def measure(config: RunConfig, trained: bool) -> Intensity:
        return run_intensity(config, layer, store.path(config) / "model" if trained else None)

    known = studies(chosen_scale, measure)
    chosen = _chosen(what, known)
    count = seeds or chosen_scale.seeds
    cells = with_seeds((config for study in chosen for config in study.configs), count)
    waiting = pending(cells, store)
    selected = [cell for cell in waiting if fnmatch.fnmatchcase(cell_name(cell), only)]
    if cells and not any(fnmatch.fnmatchcase(cell_name(cell), only) for cell in cells):
        raise ConfigurationError(f"--only '{only}' matches none of {len(cells)} cells, such as {cell_name(cells[0])}")
    console.print(f"{len(cells)} cells: {len(cells) - len(waiting)} complete, {len(selected)} to run", style="dim")
    make_folder(folder)
    kept = with_seeds((config for study in known.values() for config in study.models), count)
    with _threads(chosen_scale.threads):
        failures = _run(selected, store, run, kept, console)
    failures += _render(chosen, lambda config: store.summary(config, range(count)), folder, console)
    index = write_index(
        folder, chosen_scale, known.values(), store, seeds=count, failures=failures, origin=provenance()
    )
    console.print(f"Index: {index}", soft_wrap=True)
    for failure in failures:
        echo(f"Failed: {failure.name}: {failure.reason}", err=True)
    if failures:
        raise typer.Exit(1)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    import torch  # for which help and errors of usage need not wait

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    found = {}
    for text in given or ():
        key, separator, value = text.partition("=")
        if not (key and separator and value):
            raise ConfigurationError(f"{option} '{text}' must be TASK=VALUE")
        if key in found:
            raise ConfigurationError(f"{option} '{text}': {key} is given twice")
        found[key] = value
    return found


def _chosen(what: str, known: dict[str, "Study"]) -> list["Study"]:
    if what == ALL:
        return list(known.values())
    if what not in known:
        raise ConfigurationError(f"study '{what}' is unknown; choose from {', '.join(known)} or {ALL}")
    return [known[what]]


def _run(
    cells: Sequence[RunConfig], store: Store, run: Callable[..., Any], kept: list[RunConfig], console: Terminal
) -> list[Failure]:
    bar = Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=10),
        Words("{task.fields[left]}  {task.description}"),
        console=console,
    )
    if not cells:
        return []
    with bar:
        task = bar.add_task("", total=len(cells), left="")
        started, done = time.monotonic(), 0

        def start(cell: RunConfig) -> dict[str, Any]:
            bar.update(task, description=cell_name(cell))
            return {"listener": _Epochs(lambda row: bar.update(task, description=f"{cell_name(cell)}, {row}"))}

        def end(cell: RunConfig, failure: Failure | None) -> None:
            nonlocal done
            done += 1
            left = (time.monotonic() - started) / done * (len(cells) - done)
            bar.update(task, advance=1, left=f"{left / 60:.0f} min left")
            outcome = store.outcome(cell) if failure is None else None
            said = f"{100 * outcome.score:.1f} %" if outcome else f"failed: {failure and failure.reason}"
            console.print(f"{done} of {len(cells)}  {cell_name(cell)}: {said}", soft_wrap=True)

        return run_cells(cells, store, run, keep_models=kept, on_start=start, on_end=end)


class _Epochs(Listener):
    """Says how far a cell is."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def epoch(self, row: dict[str, Any]) -> None:
        self._show(f"epoch {row['epoch']}")


def _render(studies: Sequence["Study"], summaries: "Summaries", folder: Path, console: Terminal) -> list[Failure]:
    failures = []
    for study in studies:
        try:
            for path in study.render(summaries, folder):
                console.print(f"Wrote {path}", soft_wrap=True)
        except Exception as error:  # the other tables are worth having
            failures.append(Failure(study.name, failure_reason(error)))
    return failures
