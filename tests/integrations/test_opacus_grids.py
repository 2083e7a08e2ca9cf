"""The argument grids of Opacus's layer tests: a part of them here, all of them stored by benchmarks/opacus_grids.py."""

import json
import warnings
from collections import Counter
from itertools import groupby
from pathlib import Path

import opacus
import pytest
import torch
from torch import nn

from lsg import DPSGD, LSG
from tests.support.opacus_grids import Cell, cells
from tests.support.opacus_judge import judge

GRIDS = Path(__file__).parents[2] / "results" / "opacus" / "grids.json"
LAYERS = {name: list(group) for name, group in groupby(cells(), key=lambda cell: cell.layer)}
A_LAYER = 4  # cells, spread over its grid
REASONS = ("batch_first=False", "a batch without samples", "packed sequence", "embedding bag")  # each with a way out


def some(layer: str) -> list[Cell]:
    found = LAYERS[layer]
    return found[:: max(1, len(found) // A_LAYER)][:A_LAYER]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_part_of_the_grid_is_right_or_refused_by_name(layer: str) -> None:
    for number, cell in enumerate(some(layer)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch, of padding="same" and of nested tensors
            outcome, why = judge(cell, DPSGD() if number % 2 else LSG(rank=2, sparsity=0.5))
        assert outcome == "right" or (outcome == "refused" and any(reason in why for reason in REASONS)), (cell, why)


class Halved(nn.Linear):
    """Its gradient is another for several records than for each of them alone."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = super().forward(input)
        if out.requires_grad and len(input) > 1:
            out.register_hook(lambda gradient: gradient / 2)
        return out


class Broken(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken")


def test_what_is_wrong_or_crashes_is_told_from_what_is_refused() -> None:
    def batch() -> torch.Tensor:
        return torch.randn(3, 4, dtype=torch.float64)

    for model, outcome in ((Halved(4, 4), "WRONG"), (nn.Sequential(nn.Linear(4, 4), Broken()), "crash")):
        assert judge(Cell("?", {}, lambda model=model: model, batch, 3), DPSGD())[0] == outcome


def test_the_stored_grids_are_whole_of_committed_code_and_nothing_in_them_is_wrong() -> None:
    found = json.loads(GRIDS.read_text())
    assert not found["provenance"]["modified"] and len(found["methods"]) == 2
    assert {name: each["cells"] for name, each in found["layers"].items()} == Counter(
        {name: len(group) for name, group in LAYERS.items()}
    )
    for each in found["layers"].values():
        assert set(each["outcomes"]) <= {"right", "refused"} and each["outcomes"]["right"] and not each["bad"]
        assert sum(each["outcomes"].values()) == 2 * each["cells"]
        assert all(any(reason in refusal["why"] for reason in REASONS) for refusal in each["refused"])


def test_each_layer_that_opacus_has_gradients_for_has_a_grid() -> None:
    theirs = {kind.__name__ for kind in opacus.GradSampleModule.GRAD_SAMPLERS} - {"RNNLinear"}
    assert theirs <= set(LAYERS)
