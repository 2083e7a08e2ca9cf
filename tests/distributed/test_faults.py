"""Faults planted on one rank of three: every rank stops, with an error that names the rank and what differs there."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, PrivacyEngine
from lsg.errors import LsgError
from lsg.sampling.random_sources import TorchNoise
from lsg.step.replicas import EVERY
from tests.distributed.runs import Net, Run
from tests.support.ranks import on_ranks

BAD = 1  # the rank with the fault
Found = tuple[str, str, int]  # the error, its words, steps released before it


def begin(**changed: Any) -> Run:
    """Ten steps an epoch."""
    given = {"records": 40, "model": Net, "seed": 2, "batch_size": 4} | changed
    torch.manual_seed(0)
    model = given["model"]()
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randint(0, 20, (given["records"], 7), generator=draw), torch.arange(given["records"]) % 3
    )
    if model.first.in_features == 16:
        model.norm.weight.requires_grad_(False)
    engine = PrivacyEngine(accountant="rdp", ledger=given.get("ledger"), secure_mode=given.get("secure", False))
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=given.get("lr", 0.1)),
        data_loader=DataLoader(
            data, batch_size=given["batch_size"], generator=torch.Generator().manual_seed(given["seed"])
        ),
        noise_multiplier=given.get("noise_multiplier", 1.0),
        max_grad_norm=given.get("max_grad_norm", 1.0),
        noise_generator=torch.Generator().manual_seed(3),
        **{name: given[name] for name in ("method", "clipping", "unit_of", "views") if name in given},
    )
    return Run(engine, *made)


def epoch(run: Run, after: Callable[[int], Any] = lambda releases: None) -> None:
    """after: called after each step with the steps so far; ends the loop if it returns False."""
    for tokens, labels in run.loader:
        F.cross_entropy(run.model(tokens), labels).backward()
        run.optimizer.step()
        if after(run.optimizer._releases) is False:
            break


def at(step: int, change: Callable[[Run], None]) -> Callable[[Run], None]:
    """A run of two epochs, of which the bad rank has something changed once so many steps were taken."""

    def train(run: Run) -> None:
        done = False

        def after(releases: int) -> None:
            nonlocal done
            if releases >= step and not done and dist.get_rank() == BAD:
                change(run)
                done = True

        for _ in range(2):
            epoch(run, after)

    return train


def other_noise(run: Run) -> None:
    run.optimizer.gradients.noise = TorchNoise(torch.Generator().manual_seed(9))


def other_weight(run: Run) -> None:
    run.model.last.weight.data[0, 0] += 1e-3


def swapped_numbers(run: Run) -> None:
    run.model.last.weight.data = run.model.last.weight.data.flip(1)


def twice(run: Run) -> None:
    """A part that another step has had already enters the next one's sum."""
    run.optimizer.gradients.sum = replace(run.optimizer.gradients._empty_sum(), units=1)


def lost_loop(run: Run) -> None:
    """A step without a backward on one rank."""
    for tokens, labels in run.loader:
        if dist.get_rank() != BAD:
            F.cross_entropy(run.model(tokens), labels).backward()
        run.optimizer.step()


def left_early(run: Run) -> None:
    for _ in range(2):
        epoch(run, lambda releases: releases != 4 if dist.get_rank() == BAD else None)


def left_at_the_last_batch(run: Run) -> None:
    """The others compare replicas at the end of the epoch, which this rank does not come to."""
    for _ in range(2):
        count = len(run.loader)
        epoch(run, lambda releases, last=count: releases < last if dist.get_rank() == BAD else None)


def step_too_many(run: Run) -> None:
    epoch(run)
    if dist.get_rank() == BAD:
        run.optimizer.step()
    epoch(run)


# The rank, or what it has, must be in the words that every rank ends with.
WHILE_TRAINING: dict[str, tuple[dict[str, Any], Callable[[Run], None], str]] = {
    "another noise": ({}, at(3, other_noise), "state of the noise stream.*on rank 1"),
    "another projection": (
        {},
        at(3, lambda run: run.engine._recorder.generator.manual_seed(9)),
        "state of the projection stream.*on rank 1",
    ),
    "other samples": (
        {},
        at(3, lambda run: run.loader.logical.source.generator.manual_seed(9)),
        "state of the sampling stream.*on rank 1",
    ),
    "another weight": ({}, at(3, other_weight), "rank 1 has another weight 'last.weight'"),
    "numbers that changed places": ({}, at(3, swapped_numbers), "rank 1 has another weight 'last.weight'"),
    "another frozen weight": (
        {},
        at(3, lambda run: run.model.norm.weight.data.mul_(2)),
        "rank 1 has another weight 'norm.weight'",
    ),
    "another learning rate": (
        {},
        at(3, lambda run: run.optimizer.param_groups[0].update(lr=0.2)),
        "learning rate.*0.2.*on rank 1",
    ),
    "another max_grad_norm": (
        {},
        at(3, lambda run: setattr(run.optimizer, "max_grad_norm", 0.5)),
        "max_grad_norm.*0.5 on rank 1",
    ),
    "thresholds of the same joint norm": (
        {"clipping": "per_layer", "max_grad_norm": [0.3, 0.4, *[0.1] * 4], "method": DPSGD()},
        at(3, lambda run: setattr(run.optimizer, "max_grad_norm", [0.4, 0.3, *[0.1] * 4])),
        "max_grad_norm.*on rank 1",
    ),
    "another noise_multiplier": (
        {},
        at(3, lambda run: setattr(run.optimizer, "noise_multiplier", 0.5)),
        "noise_multiplier.*0.5 on rank 1",
    ),
    "a lost micro-batch": ({}, lost_loop, "0 units are in the sum of rank 1, whose share"),
    "a micro-batch twice": ({}, at(3, twice), "units are in the sum of rank 1, whose share"),
    "a loop left early": ({}, left_early, "the epoch.*on rank 1"),
    "a loop left at its last batch": ({}, left_at_the_last_batch, "different places.*rank 1 at step|the epoch"),
    "a step too many": ({}, step_too_many, "did not hand out, with 3 processes"),
}
# Refused on that rank at once, of which the others learn.
TOLD = {"a step too many": ["ProcessLost", "PrivacyError", "ProcessLost"]}


def train_with_faults(names: list[str]) -> dict[str, Found | None]:
    """What ended each run on this rank; None where nothing did."""
    found: dict[str, Found | None] = {}
    for name in names:
        settings, train, _ = WHILE_TRAINING[name]
        run = begin(**settings)
        try:
            train(run)
            found[name] = None
        except LsgError as error:
            found[name] = type(error).__name__, str(error), len(run.engine.accountant)
        run.engine.detach()
    return found


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Found | None]]:
    return on_ranks(3, train_with_faults, list(WHILE_TRAINING))


@pytest.mark.parametrize("name", WHILE_TRAINING)
def test_a_fault_on_one_rank_ends_the_run_on_every_rank(name: str, ends: list[dict[str, Found | None]]) -> None:
    errors = [of_rank[name] for of_rank in ends]
    assert all(error is not None for error in errors), errors
    kinds = TOLD.get(name, ["ReplicaError"] * 3)
    for expected_kind, (kind, words, steps) in zip(kinds, errors, strict=True):  # type: ignore[misc]
        assert kind == expected_kind, words
        assert steps <= 3 + EVERY and (
            steps <= 5 or "weight '" in words or "epoch" in words or "places" in words or name in TOLD
        )
    expected = WHILE_TRAINING[name][2]
    for _, words, _ in errors:  # type: ignore[misc]
        assert re.search(expected, words, re.DOTALL), words


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(24, 4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 3}, "the state of data_loader's generator differs"),
    "data": ({"records": 41}, "records differs"),
    "model": ({"model": Wide}, "the shape of 'last.weight' differs"),
    "units": ({"unit_of": [i // 2 for i in range(40)], "batch_size": 4}, "unit_of|records"),
    "noise": ({"noise_multiplier": 0.9}, "noise_multiplier differs"),
    "clip": ({"max_grad_norm": 2.0}, "max_grad_norm differs"),
    "batch": ({"batch_size": 5}, "batch_size differs"),
    "views": ({"views": 2}, "views differs"),
    "method": ({"method": DPSGD()}, "method differs"),
    "a ledger": ({"ledger": "rank-1.ledger"}, "PrivacyEngine's ledger differs"),
    "lr": ({"lr": 0.3}, "the optimizer's settings differs"),
    "noise that is refused": ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
    "an argument that is refused": ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
}


def refused() -> dict[str, tuple[str, str]]:
    found = {}
    for name, (changed, _) in REFUSED.items():
        try:
            begin(**(changed if dist.get_rank() == BAD else {})).engine.detach()
        except LsgError as error:
            found[name] = type(error).__name__, str(error)
    begin().engine.detach()  # the processes can go on
    return found


def test_arguments_that_differ_are_refused_on_every_rank() -> None:
    for rank, found in enumerate(on_ranks(3, refused)):
        assert found.keys() == REFUSED.keys(), (rank, REFUSED.keys() - found.keys())
        for name, (kind, words) in found.items():
            assert kind == "ConfigurationError" and re.search(REFUSED[name][1], words), (rank, words)
            assert "rank 1" in words or "=-1.0" in words


def looks_on_one_rank() -> list[torch.Tensor]:
    """An evaluation on one rank, without and with autograd, is nobody else's business."""
    found = []
    for look in (False, True):
        run = begin()

        def after(releases: int, run: Run = run, look: bool = look) -> None:
            if look and dist.get_rank() == BAD:
                with torch.no_grad():
                    run.model(torch.ones(3, 7, dtype=torch.int64))
                run.model(torch.ones(2, 7, dtype=torch.int64))

        epoch(run, after)
        found.append(run.model.last.weight.detach().clone())
        run.engine.detach()
    return found


def test_an_evaluation_on_one_rank_changes_nothing() -> None:
    for before, after in on_ranks(2, looks_on_one_rank):
        assert torch.equal(before, after)
