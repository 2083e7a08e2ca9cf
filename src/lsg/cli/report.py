"""`lsg report`: output folders of `lsg train` or `lsg reproduce` in, one HTML page out."""

from pathlib import Path
from typing import Annotated

import typer

from lsg.errors import ConfigurationError
from lsg.files.atomic import write_atomic
from lsg.files.terminal import echo
from lsg.report import find_runs, render


def report(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of runs, or folders that contain such folders.")],
    output: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Private training runs",
) -> None:
    """Show runs as one HTML page: tables, interactive charts, privacy statements. Opening it needs no network."""
    if output.is_dir():
        raise ConfigurationError(f"--output {output}: is a folder; name a file, such as {output / 'report.html'}")
    found = find_runs(runs)
    page = render(found, title)
    write_atomic(output, page, secret=True)  # it holds losses and seeds
    incomplete = sum(not run.complete for run in found)
    told = f"{incomplete} of them incomplete" if incomplete else "complete"
    echo(f"Wrote {output}: {len(found)} {'run' if len(found) == 1 else 'runs'}, {told}")
