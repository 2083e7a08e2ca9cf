"""The generator finds each planted bug within a few hundred graphs, and it is the oracle that does."""

from functools import cache

import pytest

from tests.adversarial.graphs import draw_trial
from tests.adversarial.oracle import judge
from tests.adversarial.planted import BUGS

_GRAPHS = 500


@cache
def right_without(seed: int) -> bool:
    """Whether the graph is trained rightly without any bug: only there can one be found."""
    return judge(draw_trial(seed)).kind == "right"


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    for seed in range(_GRAPHS):
        if not right_without(seed):
            continue
        with BUGS[name]():
            outcome = judge(draw_trial(seed))
        if outcome.kind == "silent":
            assert judge(draw_trial(seed)).kind == "right"  # the bug is gone again
            return
    pytest.fail(f"{_GRAPHS} graphs did not show '{name}'")


def test_there_are_ten() -> None:
    assert len(BUGS) >= 10
