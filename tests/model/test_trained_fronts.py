"""A network in front of a private model, trained through it by another optimizer."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model.test_guards import private

MESSAGE = "a network in front of the private model is trained through it"


def warnings_of(prepared: Callable[[Tensor], Tensor], **options: Any) -> list[str]:
    """What was warned of in an epoch whose inputs were prepared so."""
    _, model, optimizer, loader = private(noise_generator=torch.Generator().manual_seed(1), **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for x, y in loader:
            F.cross_entropy(model(prepared(x)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in seen]


def test_one_that_sees_records_is_warned_of_once() -> None:
    (words,) = warnings_of(nn.Sequential(nn.Linear(5, 5), nn.Tanh()))
    assert MESSAGE in words and "make it a part of the model" in words


@pytest.mark.parametrize("what", ["frozen", "adversarial", "trained, without a gradient"])
def test_what_trains_no_network_is_not(what: str) -> None:
    front = nn.Linear(5, 5).requires_grad_(what.startswith("trained"))

    def prepared(x: Tensor) -> Tensor:
        if what == "adversarial":
            return front(x.requires_grad_())
        return front(x).detach() if what.startswith("trained") else front(x)

    assert warnings_of(prepared) == []


def test_batches_of_one_size_show_nothing() -> None:
    assert warnings_of(nn.Linear(5, 5), poisson_sampling=False) == []
