"""One search: its description in, an output folder with the best settings out, and of a paid search the best model.

Nothing is released before the last run: who stopped at a score that they liked would change what the bound is about.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lsg.sampling.random_sources import fresh_generator
from lsg.tasks.measures import measure_of
from lsg.train.config import RunConfig
from lsg.train.result import RunResult
from lsg.train.run import run
from lsg.tune.candidates import told
from lsg.tune.folder import SearchFolder
from lsg.tune.listener import Outcome, SearchListener
from lsg.tune.plan import check_unchanged, make_plan, prepare_for
from lsg.tune.search import Plan, Search
from lsg.tune.statement import cost, paid_statement

_GRID = 1024  # noisy scores are multiples of 1/1024 answers: they must not tell more than exact noise would


def tune(
    search: Search | None, output: Path, *, resume: bool = False, listener: SearchListener | None = None
) -> Outcome:
    """Search as described, or with `resume` go on with the search that `output` holds."""
    folder, listener = SearchFolder(output), listener or SearchListener()
    with folder.held(resume=resume):
        if resume:
            finished = folder.outcome()
            if finished is not None:
                folder.withhold(finished["best"])  # if that was cut off
                return Outcome(**finished)
            search, plan = folder.begun()
            if search.is_paid:
                check_unchanged(search, plan, listener)
        else:
            assert search is not None
            plan = make_plan(search, listener)
            folder.begin(search, plan)
        return _search(search, plan, folder, listener)


def _search(search: Search, plan: Plan, folder: SearchFolder, listener: SearchListener) -> Outcome:
    prepare = prepare_for(search.held_out is not None)
    scores: list[float] = []
    tried = [told(config, search.varied) for config in map(_as_config, plan.settings)]
    best, winner, measure = 0, None, measure_of(search.base.task)
    for number, config in enumerate(plan.runs, start=1):
        listener.begins(number, len(plan.runs), tried[number - 1])
        result = run(config, folder.run(number), resume=True, listener=listener, prepare=prepare)
        folder.withhold_statement(number)
        scores.append(chosen_by(plan, config, result))
        listener.ended(number, scores[-1], measure)
        if winner is None or measure.is_better(scores[-1], scores[best - 1]):
            loser, best, winner = best, number, result
        else:
            loser = number
        if loser and search.is_paid:
            folder.withhold(loser)
        elif not search.is_paid:
            folder.withhold(number)
    assert winner is not None
    statement = None
    if search.is_paid:
        released = paid_statement(search, plan, winner, scores[best - 1])
        folder.release(best, released)
        statement = released["statement"]
    settings = plan.settings[best - 1]
    outcome = Outcome(best, scores, tried, settings, cost(search, plan), statement, measure.name)
    folder.write_settings(settings, f"Chosen by lsg tune.\n{outcome.cost}")
    folder.complete(asdict(outcome))
    folder.withhold(best)  # a paid search has released it by now
    return outcome


def chosen_by(plan: Plan, config: RunConfig, result: RunResult) -> float:
    """The score that runs are compared by: of a paid search, the count of right answers with noise, over the records.

    One record more or less changes the count by 1 at most. The noise follows from the run's seed, so that a search
    which goes on after a crash compares what it would have compared.
    """
    if not plan.score_noise:
        return result.score
    source = fresh_generator(torch.device("cpu"), f"score:{config.seed}".encode())
    noise = plan.score_noise * float(torch.randn((), generator=source, dtype=torch.float64))
    return (round(result.score * plan.scored) + round(_GRID * noise) / _GRID) / plan.scored


def _as_config(settings: dict[str, Any]) -> RunConfig:
    return RunConfig.from_dict(settings, "tuned.toml")
