"""Phases and a grid in, their composition on it out. Keeps earlier compositions, and adds only new steps to them."""

from collections import Counter
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from lsg.accounting.phases import Phase

Grid = TypeVar("Grid")
Composed = TypeVar("Composed")

_MOST_KEPT = 4  # enough for a history's composition on its grids, and for steps that a search tries beyond it


class _Kept(NamedTuple, Generic[Grid, Composed]):
    grid: Grid
    steps: Counter[tuple[float, float]]  # of each noise multiplier and sample rate
    composed: Composed


class Compositions(Generic[Grid, Composed]):
    """Keeps the compositions that were last asked for. A longer history is made from the longest kept one it contains.

    extend: a composition (None: no steps), a phase and a grid in, the composition with that phase's steps out.
    """

    def __init__(self, extend: Callable[[Composed | None, Phase, Grid], Composed]) -> None:
        self._extend = extend
        self._kept: list[_Kept[Grid, Composed]] = []  # the last used is last

    def of(self, phases: tuple[Phase, ...], grid: Grid) -> Composed:
        """phases: at least one, no two of the same noise and rate."""
        wanted = Counter({(noise, rate): steps for noise, rate, steps in phases})
        contained = [kept for kept in self._kept if kept.grid == grid and kept.steps <= wanted]
        nearest = max(contained, key=lambda kept: kept.steps.total(), default=None)
        if nearest is not None and nearest.steps == wanted:
            recent = [nearest]
        else:
            recent = [*([nearest] if nearest else []), self._extended(nearest, wanted, grid)]
        self._kept = [*(kept for kept in self._kept if kept is not nearest), *recent][-_MOST_KEPT:]
        return recent[-1].composed

    def _extended(
        self, nearest: _Kept[Grid, Composed] | None, wanted: Counter[tuple[float, float]], grid: Grid
    ) -> _Kept[Grid, Composed]:
        composed = nearest.composed if nearest else None
        for (noise, rate), steps in (wanted - nearest.steps if nearest else wanted).items():
            composed = self._extend(composed, Phase(noise, rate, steps), grid)
        assert composed is not None
        return _Kept(grid, wanted, composed)
