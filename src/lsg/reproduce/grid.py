"""Many runs, one after the other: cells in, a store with their results out. A failing cell does not stop the rest."""

import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lsg.errors import LsgError
from lsg.files.atomic import OWNER_ONLY_FOLDER, write_atomic
from lsg.reproduce.store import Store, cell_name
from lsg.train.config import RunConfig


@dataclass(frozen=True)
class Failure:
    """name: of a cell or a study. reason: one line."""

    name: str
    reason: str


def with_seeds(configs: Iterable[RunConfig], seeds: int) -> list[RunConfig]:
    """Each different cell once. All of seed 0 come first: a grid stopped early has one of each."""
    unique = dict.fromkeys(configs)
    return [replace(config, seed=seed) for seed in range(seeds) for config in unique]


def pending(cells: Sequence[RunConfig], store: Store) -> list[RunConfig]:
    """Those that are not complete. Refuses, before anything is trained, a store made with other settings."""
    return [cell for cell in cells if store.outcome(cell) is None]


def run_cells(
    cells: Sequence[RunConfig],
    store: Store,
    run: Callable[..., Any],
    *,
    keep_models: Collection[RunConfig] = (),
    on_start: Callable[[RunConfig], dict[str, Any]] = lambda cell: {},
    on_end: Callable[[RunConfig, Failure | None], None] = lambda cell, failure: None,
) -> list[Failure]:
    """Train the cells; returns those that failed, each with its traceback in `error.txt` of its folder.

    run: `lsg.train.run.run` or one like it. keep_models: the cells whose trained weights stay on disk.
    on_start: returns further arguments for it, such as a listener.
    """
    failures = []
    for cell in cells:
        options = on_start(cell)
        failure = None
        try:
            store.train(cell, run, **options)
            if cell not in keep_models:
                store.drop_model(cell)
        except Exception as error:  # whatever it is, the other cells are worth having
            failure = Failure(cell_name(cell), failure_reason(error))
            failures.append(failure)
            _keep_traceback(store, cell)
        on_end(cell, failure)
    return failures


def failure_reason(error: Exception) -> str:
    """The error as one line, with its type if it is an unexpected one."""
    text = " ".join(str(error).split())
    return text if isinstance(error, LsgError | OSError) else f"{type(error).__name__}: {text}"


def _keep_traceback(store: Store, cell: RunConfig) -> None:
    try:
        store.path(cell).mkdir(mode=OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
        write_atomic(store.path(cell) / "error.txt", traceback.format_exc(), secret=True)
    except OSError:
        pass  # a full disk, which may be why the cell failed: the reason is still reported
