"""A logical batch is shared among ranks: each unit on one of them, the same shares wherever they are computed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lsg.sampling.shares import shares

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
