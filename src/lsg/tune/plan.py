"""Plans a search: its description in, the runs that it makes out, with noise and seeds drawn once."""

from dataclasses import replace
from functools import partial

import torch

from lsg.accounting.calibration import calibrate_noise
from lsg.accounting.rdp import curve_epsilon
from lsg.accounting.selection import (
    calibrate_candidates,
    calibrate_score_noise,
    gaussian_curve,
    largest,
    run_curve,
    selection_epsilon,
)
from lsg.errors import ConfigurationError
from lsg.sampling.plan import SamplingPlan
from lsg.sampling.random_sources import fresh_generator
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.precision import choose_device
from lsg.train.prepare_data import PreparedData, prepare_data
from lsg.train.run import check_against_data
from lsg.tune.candidates import candidates
from lsg.tune.search import SCORED_SHARE, Plan, Search, release_settings
from lsg.tune.stand_in import stand_in


def make_plan(search: Search, listener: Listener) -> Plan:
    return _paid(search, listener) if search.is_paid else _free(search, listener)


def _paid(search: Search, listener: Listener) -> Plan:
    """Each run draws a candidate and a seed of its own; all of them and their number cost the base's ε together."""
    base = _scored_apart(search)
    data = _data(base, listener)
    choices = candidates(base, search.varied)
    for choice in choices:
        check_against_data(choice, data)
    accounted = [SamplingPlan(len(data.train), choice.batch_size).accounted(choice.epochs) for choice in choices]
    assert base.epsilon is not None
    budget = (search.repeats, base.epsilon, base.delta)
    noises = calibrate_candidates(accounted, *budget)
    score_noise = calibrate_score_noise(*budget)
    costliest = largest([run_curve(noise, *plan) for plan, noise in noises.items()])
    source = _source(search)
    number = search.repeats.number(float(torch.rand((), generator=source, dtype=torch.float64)))
    drawn = [int(torch.randint(len(choices), (), generator=source)) for _ in range(number)]
    return Plan(
        runs=tuple(
            replace(choices[i], epsilon=None, noise_multiplier=noises[accounted[i]], seed=_seed(source)) for i in drawn
        ),
        settings=tuple(release_settings(choices[i], validation=search.base.validation) for i in drawn),
        # A record is trained on or scored on, never both: each is charged for what it takes part in.
        epsilon=max(
            selection_epsilon(curve, search.repeats, base.delta) for curve in (costliest, gaussian_curve(score_noise))
        ),
        one_run_epsilon=curve_epsilon(costliest, base.delta),
        candidates=len(choices),
        score_noise=score_noise,
        records=len(data.train),
        scored=len(data.evaluation["validation"]),
    )


def check_unchanged(search: Search, plan: Plan, listener: Listener) -> None:
    """Before a paid search goes on: with more or fewer records its noise would not be that of its ε."""
    data = _data(_scored_apart(search), listener)
    found = len(data.train), len(data.evaluation["validation"])
    if found != (plan.records, plan.scored):
        raise ConfigurationError(
            f"--resume: the search was begun with {plan.records:,} records to train and {plan.scored:,} to score on, "
            f"and now there are {found[0]:,} and {found[1]:,}: its epsilon would not hold. Bring back the data that it "
            "was begun with, or begin another search, which spends privacy of its own"
        )


def _scored_apart(search: Search) -> RunConfig:
    """The base of a paid search, with a part of the records to score on."""
    return replace(search.base, validation=search.base.validation or SCORED_SHARE)


def _free(search: Search, listener: Listener) -> Plan:
    """Different candidates, the base first, all with one seed: runs that stand in for those on the private data."""
    base = replace(search.base, tuning_part=search.held_out)
    private = _data(base, listener)
    source = _source(search)
    choices = candidates(base, search.varied)
    order = [0, *(1 + int(i) for i in torch.randperm(len(choices) - 1, generator=source))]
    chosen = [choices[i] for i in order[: search.runs]]
    for choice in chosen:
        check_against_data(choice, private)
    here = {"data": search.public_data} if search.held_out is None else {"validation": base.validation or SCORED_SHARE}
    records, seed, runs = len(private.train), _seed(source), []
    own_records = len(_data(replace(base, **here), listener, search.held_out is not None).train)
    for choice in chosen:
        rate, steps = SamplingPlan(records, choice.batch_size).accounted(choice.epochs)
        assert choice.epsilon is not None
        noise = calibrate_noise(
            accountant=choice.accountant,
            target_epsilon=choice.epsilon,
            target_delta=choice.delta,
            sample_rate=rate,
            steps=steps,
        )
        instead = stand_in(choice, noise, records=records, own_records=own_records, shrink=search.shrink)
        runs.append(replace(instead, seed=seed, **here))
    return Plan(tuple(runs), tuple(map(release_settings, chosen)), candidates=len(choices))


def _data(config: RunConfig, listener: Listener, only_tuning_part: bool = False) -> PreparedData:
    return prepare_for(only_tuning_part)(config, choose_device(config.device), listener)


def prepare_for(only_tuning_part: bool) -> "partial[PreparedData]":
    """How the data of a search's runs are read."""
    return partial(prepare_data, only_tuning_part=only_tuning_part)


def _source(search: Search) -> torch.Generator:
    return fresh_generator(torch.device("cpu"), f"search:{search.base.seed}".encode())


def _seed(source: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=source))
