"""Which settings are tried, and what stands in for a private run."""

import dataclasses

import pytest

from lsg.errors import ConfigurationError
from lsg.sampling.plan import SamplingPlan
from lsg.train.config import RunConfig
from lsg.train.presets import preset
from lsg.tune.candidates import candidates, read_variations, told, usual_variations
from lsg.tune.search import Search
from lsg.tune.stand_in import stand_in

BASE = RunConfig(task="digits", epsilon=3.0, **preset("digits", "lsg"))


def test_usual_variations_lie_around_the_base_and_contain_it() -> None:
    found = candidates(BASE, usual_variations(BASE))
    assert len(found) == len(set(found)) == 12
    assert found[0] == BASE
    assert {config.lr for config in found} == {0.0667, 0.2, 0.6}
    assert {config.epochs for config in found} == {20, 40}


def test_variations_are_read_in_the_type_of_their_setting() -> None:
    varied = read_variations(["lr=0.1, 1", "max-grad-norm=2", "method=lsg,rgp", "rank=4"])
    assert varied == {"lr": [0.1, 1.0], "max_grad_norm": [2.0], "method": ["lsg", "rgp"], "rank": [4]}
    assert told(candidates(BASE, varied)[1], varied) == "lr 0.1, max_grad_norm 2.0, method rgp, rank 4"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["epsilon=1,2"], "'epsilon' cannot be varied"),
        (["rate=1"], "'rate' cannot be varied; one of model, method"),
        (["lr"], "give values"),
        (["rank=many"], "--rank takes int values"),
        (["lr=0.1", "lr=0.2"], "--lr is given twice"),
    ],
)
def test_bad_variations_are_refused(given: list[str], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        read_variations(given)


def test_a_bad_value_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigurationError, match=r"--lr -1\.0 must be positive"):
        candidates(BASE, {"lr": [-1.0]})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"public_data": "x", "held_out": 0.2}, "not both"),
        ({"held_out": 1.5}, "--held-out 1.5"),
        ({"runs": 0}, "--runs 0"),
        ({"shrink": 2}, "a paid search releases the model"),
        ({"draw": "coin"}, "poisson, geometric"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(changes: dict, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        Search(BASE, {}, **changes)


def test_persons_as_units_are_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class WithUnits(RunConfig):
        unit_column: str | None = None

    with pytest.raises(ConfigurationError, match="would protect persons too little"):
        Search(WithUnits(**BASE.to_dict(), unit_column="person"), {})


@pytest.mark.parametrize(("own_records", "shrink"), [(1437, 1), (1437, 4), (5000, 1), (700, 1), (700, 4), (90_000, 1)])
def test_a_stand_in_keeps_noise_to_batch_and_the_number_of_steps(own_records: int, shrink: int) -> None:
    instead = stand_in(BASE, 3.0, records=1437, own_records=own_records, shrink=shrink)
    assert instead.noise_multiplier is not None
    assert instead.noise_multiplier / instead.batch_size == pytest.approx(3.0 / BASE.batch_size, rel=1e-9)
    steps = SamplingPlan(own_records, instead.batch_size).steps(instead.epochs)
    assert steps == pytest.approx(SamplingPlan(1437, BASE.batch_size).steps(BASE.epochs), rel=0.02)
    if own_records <= 5000:  # of very many records one epoch is more than all private steps need
        assert instead.batch_size == pytest.approx(BASE.batch_size / shrink, rel=0.15)


def test_a_full_stand_in_on_as_many_records_is_the_run_itself() -> None:
    instead = stand_in(BASE, 3.0, records=1437, own_records=1437, shrink=1)
    assert (instead.batch_size, instead.epochs, instead.noise_multiplier) == (BASE.batch_size, BASE.epochs, 3.0)


def test_a_stand_in_of_few_records_takes_all_of_them_at_each_step() -> None:
    found = stand_in(BASE, 3.0, records=1437, own_records=100, shrink=1)
    steps = BASE.epochs * 1437 / BASE.batch_size
    assert found.batch_size == 100 and found.epochs == round(steps)
    assert found.noise_multiplier == 3.0 * 100 / BASE.batch_size
