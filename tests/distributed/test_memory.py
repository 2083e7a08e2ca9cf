"""Memory runs out on one rank, which tries again in pieces while the others wait: the same run."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lsg import LSG
from tests.step.test_out_of_memory import Gpu, trained
from tests.support.ranks import on_ranks


def run_with_too_little_memory() -> tuple[Tensor, list[tuple[float, float, int]], list[int]]:
    model = Gpu(fits=2 if dist.get_rank() == 1 else 10**9, where="backward")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "memory ran out")
        weights, _, engine = trained(model, LSG(rank=2, sparsity=0.5))
    return weights, [tuple(phase) for phase in engine.accountant.history], model.sizes


def test_a_rank_that_runs_out_of_memory_holds_up_no_other_and_changes_nothing() -> None:
    wanted, _, engine = trained(Gpu(where="backward"))
    first, second = on_ranks(2, run_with_too_little_memory)
    assert torch.equal(first[0], second[0])
    assert float((first[0] - wanted).abs().max()) < 1e-5
    assert first[1] == second[1] == [pytest.approx(tuple(phase)) for phase in engine.accountant.history]
    assert max(second[2]) <= 2 < max(first[2])
