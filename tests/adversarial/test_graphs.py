"""A part of the random attacks, small enough for every run of the tests: nothing silent, no crash."""

from collections import Counter

import pytest

from tests.adversarial.graphs import draw_program, draw_trial
from tests.adversarial.oracle import judge
from tests.adversarial.outcome import Outcome

_GRAPHS = 150
_PARTS = 5  # so that a failure names its neighbourhood, and workers can share


@pytest.fixture(scope="module")
def outcomes() -> dict[int, Outcome]:
    return {}


@pytest.mark.parametrize("part", range(_PARTS))
def test_random_models_are_right_or_refused(part: int, outcomes: dict[int, Outcome]) -> None:
    seeds = range(part, _GRAPHS, _PARTS)
    outcomes |= {seed: judge(draw_trial(seed)) for seed in seeds}
    found = {seed: outcomes[seed] for seed in seeds}
    failures = [f"{seed}: {draw_program(seed)}: {o}" for seed, o in found.items() if not o.acceptable]
    print(Counter(f"{o.kind}, {'clean' if o.clean else 'mixing'}" for o in found.values()))
    assert not failures, "\n".join(failures)


def test_a_trial_is_the_same_each_time() -> None:
    assert judge(draw_trial(11)) == judge(draw_trial(11))


def test_most_drawn_graphs_run_and_both_sorts_occur(outcomes: dict[int, Outcome]) -> None:
    found = list(outcomes.values()) or [judge(draw_trial(seed)) for seed in range(40)]
    assert sum(o.kind == "invalid" for o in found) <= 0.05 * len(found)
    assert 0.2 < sum(o.clean for o in found) / len(found) < 0.8
