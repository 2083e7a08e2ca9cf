"""Gradients of rows in, gradients of units out: the rows of a unit are averaged before the clip.

A unit is what is added or removed (one record, or all records of one person). Its rows are adjacent. One averaged
vector a unit goes to the clipper, so that a clipped sum changes by at most its bound when a unit is added or removed.

A NaN or Inf in a row stays in its unit's average, and in no other: each unit is computed from its own rows only.

Shapes: R = rows of the micro-batch, U = units.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lsg.parameters.outer import OuterProducts
from lsg.step.clip_groups import Part


def average_units(part: Part, unit_rows: Sequence[int]) -> Part:
    """part: (R, entries), or factors of it. unit_rows: how many of the rows, one unit after the other, are each unit's;
    they add up to R. Returns (U, entries), or factors of it where all units have as many rows."""
    assert part.shape[0] == sum(unit_rows) and min(unit_rows) > 0
    sizes = set(unit_rows)
    if len(sizes) == 1:
        return _average_alike(part, sizes.pop())
    starts = [0]
    for size in unit_rows:
        starts.append(starts[-1] + size)
    averages: Tensor | None = None
    # Size by size rather than by index_add, whose order of summation, and so the last bit, is chance on a GPU.
    for size in sorted(sizes):
        units = [unit for unit, own in enumerate(unit_rows) if own == size]
        rows = [row for unit in units for row in range(starts[unit], starts[unit + 1])]
        found = _average_alike(_take(part, rows), size)
        explicit = found.explicit() if isinstance(found, OuterProducts) else found
        if averages is None:
            averages = explicit.new_empty(len(unit_rows), explicit.shape[1])
        averages[torch.tensor(units, device=explicit.device)] = explicit
    assert averages is not None
    return averages


def _average_alike(part: Part, size: int) -> Part:
    """Of units that have `size` rows each."""
    if size == 1:
        return part
    if isinstance(part, OuterProducts):
        return part.average_adjacent(size)
    return part.unflatten(0, (-1, size)).mean(1)


def _take(part: Part, rows: list[int]) -> Part:
    if isinstance(part, OuterProducts):
        return part.take(torch.tensor(rows, device=part.rows.device))
    return part.index_select(0, torch.tensor(rows, device=part.device))
