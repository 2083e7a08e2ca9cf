"""Several ranks give what one process gives: the same weights to rounding, the same ε, replicas equal to the bit."""

import itertools

import pytest

from tests.distributed.runs import METHODS, Setting, distance, train_all
from tests.support.ranks import on_ranks

UNEVEN = [1, 2, 3, 50, 4] * 12
SETTINGS = [
    *(
        Setting(method=method, clipping=clipping)
        for method, clipping in itertools.product(METHODS, ("flat", "per_layer", "automatic"))
        if method != "non-private" or clipping == "flat"
    ),
    Setting(batch_size=1, epochs=2),  # empty draws, and ranks without a share
    Setting(batch_size=2, records=9, physical=None),
    Setting(views=3, physical=6),
    Setting(unit_of=[i // 3 if i < 30 else 10 + i % 4 for i in range(60)], physical=None, batch_size=3),
    Setting(lengths=UNEVEN, max_tokens=100),
    Setting(extra={"poisson_sampling": False}),
    Setting(extra={"loss_reduction": "mean"}, seed=4),
]


@pytest.fixture(scope="module")
def alone() -> list:  # type: ignore[type-arg]
    return train_all(SETTINGS)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_several_ranks_give_the_run_of_one_process(size: int, alone: list) -> None:  # type: ignore[type-arg]
    ranks = on_ranks(size, train_all, SETTINGS)
    for number, (setting, expected) in enumerate(zip(SETTINGS, alone, strict=True)):
        found = [results[number] for results in ranks]
        for rank, result in enumerate(found):
            assert distance(result, found[0]) == 0, (setting, rank)
            assert distance(result, expected) < 1e-5, (setting, rank)
            assert result.epsilon == expected.epsilon and result.steps == expected.steps
        assert sum(sum(result.sizes) for result in found) == sum(expected.sizes)
        assert sum(expected.sizes) == 0 or any(result.sizes != expected.sizes for result in found)
