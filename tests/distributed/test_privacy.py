"""The mechanism on two ranks: what one unit changes, how much noise is in a step, and that ranks draw the same."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, ConfigurationError, PrivacyEngine
from lsg.distributed.group import Group
from tests.distributed.runs import Setting, begin, train
from tests.step.test_unit_neighbours import BROKEN, CLIPPINGS, IDS, METHODS, C, sum_without
from tests.support.ranks import on_ranks

CASES = list(itertools.product(range(len(METHODS)), CLIPPINGS))


def sums_with_and_without() -> list[list[Tensor]]:
    """Of each case the sum of all units that both ranks release, and those with one unit gone."""
    from lsg.step.gradients import PrivateGradients

    kept: list[Tensor] = []
    release = PrivateGradients.release

    def noted(self: Any, noise_multiplier: float) -> None:
        kept.append(self.sum.vector)
        release(self, noise_multiplier)

    PrivateGradients.release = noted  # type: ignore[method-assign]
    found = []
    for method, clipping in CASES:
        given = {"unit_of": IDS, "clipping": clipping}
        gone = (None, 2, BROKEN[1])  # one of three records, and one with a NaN
        found.append([sum_without(unit, METHODS[method], given, kept, rows=3) for unit in gone])
    return found


def test_one_unit_changes_the_sum_of_all_ranks_by_at_most_the_bound() -> None:
    """A unit gone moves the others from rank to rank."""
    first, second = on_ranks(2, sums_with_and_without, seconds=300)
    for case, ours, theirs in zip(CASES, first, second, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), case
        whole, other, broken = ours
        assert C / 2 <= float((whole - other).norm()) <= C * (1 + 1e-6), case
        assert torch.allclose(whole, broken, rtol=1e-9, atol=1e-12), case  # a unit with a NaN counts as zero


SIGMA, LR, STEPS, BATCH, CLIP = 1.7, 0.5, 40, 4, 0.3


def noise_of_steps() -> Tensor:
    """What each step released over records without a gradient: noise alone, as a mean."""
    torch.manual_seed(dist.get_rank())  # the model's weights are rank 0's all the same
    model = torch.nn.Linear(40, 25, bias=False)
    engine = PrivacyEngine(accountant="rdp")
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(TensorDataset(torch.zeros(40, 40)), batch_size=BATCH),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        method=DPSGD(),
        noise_generator=torch.Generator().manual_seed(5),
    )
    found = []
    while len(found) < STEPS:
        before = model.weight.detach().clone()
        for (x,) in loader:
            model(x).square().mean(1).mean().backward()
            optimizer.step()
        found.append((before - model.weight.detach()) / LR / math.sqrt(loader.steps(1)))
    engine.detach()
    return torch.stack(found).flatten(1)


def test_noise_is_added_once_for_all_ranks_and_is_new_at_each_step() -> None:
    """False alarms: 1e-5 for the deviation of 40,000 numbers at 3 %, as many for a correlation of 4.4 / sqrt(1000)."""
    first, second = on_ranks(2, noise_of_steps)
    assert torch.equal(first, second)
    expected = SIGMA * CLIP / BATCH
    assert float(first.std()) == pytest.approx(expected, rel=0.03)  # neither sqrt(2) times as much, nor half
    neighbours = (first[1:] * first[:-1]).mean(1) / expected**2
    assert float(neighbours.abs().max()) < 4.9 / math.sqrt(first.shape[1])


def secure_weights() -> list[Tensor]:
    ended = train(Setting(epochs=1), secure=True)
    return list(ended.weights.values())


def test_secure_runs_have_the_same_numbers_on_all_ranks_and_no_two_runs_have() -> None:
    first, second = on_ranks(2, secure_weights)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    again, _ = on_ranks(2, secure_weights)
    assert not any(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def unseeded_weights() -> list[Tensor]:
    """Of a run that was given no generator; a difference between ranks would end it at its first step."""
    model = torch.nn.Linear(40, 25, bias=False)
    engine = PrivacyEngine(accountant="rdp")
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(TensorDataset(torch.zeros(40, 40)), batch_size=BATCH),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
    )
    for (x,) in loader:
        model(x).square().mean(1).mean().backward()
        optimizer.step()
    return [model.weight.detach()]


def test_runs_without_a_seed_have_the_same_numbers_on_all_ranks_and_no_two_runs_have() -> None:
    first, second = on_ranks(2, unseeded_weights)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], on_ranks(2, unseeded_weights)[0][0])


def secure_on_one_rank() -> str:
    with pytest.raises(ConfigurationError) as error:
        begin(Setting(), secure=Group.current().first)
    return str(error.value)


def test_secure_mode_on_one_rank_alone_is_refused_by_name() -> None:
    assert all("PrivacyEngine's secure_mode differs" in said for said in on_ranks(2, secure_on_one_rank))


def hostile_tensors() -> list[Tensor]:
    """Rank 0's of many layouts and kinds, as each rank gets them."""
    mine = dist.get_rank() + 1
    base = torch.arange(24.0) * mine
    given = [
        base.view(4, 6).t(),
        base.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        base[::2],
        torch.tensor(float(mine)),
        base > 8,
        base.bfloat16(),
        base.to(torch.complex64),
        torch.empty(0),
    ]
    group = Group.current()
    group.meet("a test")
    return [group.from_first(tensor).clone() for tensor in given]


def test_tensors_of_any_layout_become_those_of_rank_0() -> None:
    first, second = on_ranks(2, hostile_tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert float(first[3]) == 1 and int(first[4].sum()) == 15
