"""A logical batch in, the share of it that each rank computes out: of like cost, so that nobody waits long."""

import heapq
from collections.abc import Sequence


def shares(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Places of the units in each rank's share, ascending; each unit is in one share. Every rank finds the same ones.

    costs: of each unit, rows or tokens. The costliest first, each goes to the rank that has least so far.
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    if len(set(costs)) <= 1:
        return [list(range(rank, len(costs), ranks)) for rank in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for place in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, rank = heapq.heappop(loads)
        found[rank].append(place)
        heapq.heappush(loads, (load + costs[place], rank))
    return [sorted(places) for places in found]
