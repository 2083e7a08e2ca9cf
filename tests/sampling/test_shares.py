"""A logical batch is shared among ranks: each unit on one of them, the same shares wherever they are computed."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lsg.distributed.group import Group
from lsg.sampling.plan import SamplingPlan
from lsg.sampling.poisson_batches import LogicalBatches
from lsg.sampling.random_sources import TorchNoise
from lsg.sampling.shares import shares
from lsg.sampling.units import Units, make_units

COSTS = st.lists(st.integers(0, 1000), max_size=60)


@settings(deadline=None)
@given(costs=COSTS, ranks=st.integers(1, 9))
def test_each_unit_is_in_one_share_and_no_rank_has_much_more_than_another(costs: list[int], ranks: int) -> None:
    found = shares(costs, ranks)
    assert found == shares(list(costs), ranks)
    assert len(found) == ranks and sorted(place for share in found for place in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in found)
    loads = [sum(costs[place] for place in share) for share in found]
    assert max(loads) - min(loads) <= max(costs, default=0)


@settings(deadline=None)
@given(count=st.integers(0, 50), cost=st.integers(0, 9), ranks=st.integers(1, 9))
def test_units_of_one_cost_are_shared_by_number(count: int, cost: int, ranks: int) -> None:
    sizes = [len(share) for share in shares([cost] * count, ranks)]
    assert max(sizes) - min(sizes) <= 1


def tokens_of_each_rank(lengths: list[int], units: Units, plan: SamplingPlan, ranks: int) -> list[list[int]]:
    """For each rank the tokens of its share of each logical batch."""
    found = []
    for rank in range(ranks):
        group: Any = Group()
        group.rank, group.size = rank, ranks
        source = TorchNoise(torch.Generator().manual_seed(3))
        batches = LogicalBatches(plan, source, lengths=lengths, units=units, group=group)
        epoch = batches.draw_epoch(0)
        found.append([sum(lengths[record] for micro in logical for record in micro) for logical in epoch])
    return found


@pytest.mark.parametrize("unit_of", [None, [number // 2 for number in range(120)]])
def test_ranks_get_as_many_tokens_of_each_logical_batch_whoever_has_how_many_records(unit_of: Any) -> None:
    """Record lengths for which shares of like number are of unlike cost: a long one in every third place."""
    lengths = [90 if number % 3 == 0 else 1 for number in range(120)]
    units = make_units(120, views=1, unit_of=unit_of, max_records_per_unit=None)
    plan = SamplingPlan(units.count(120), 30 if unit_of is None else 15)
    loads = tokens_of_each_rank(lengths, units, plan, ranks=3)
    assert sum(map(sum, loads)) > 0
    for of_ranks in zip(*loads, strict=True):
        assert max(of_ranks) - min(of_ranks) <= (90 if unit_of is None else 91)
