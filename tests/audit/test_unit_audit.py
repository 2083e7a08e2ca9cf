"""The audit at the level of units: a canary is a whole unit of several records, in several views, added or removed."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from lsg.audit.batches import audit_batches
from lsg.audit.one_run import audit_one_run
from lsg.audit.report import audited_method
from lsg.audit.rig import Rig, UnitShape, blank
from lsg.audit.settings import CLIPPINGS
from lsg.audit.white_box import WhiteBox, audit_run, audit_step
from lsg.methods import DPSGD, PRIVATE_METHODS
from lsg.step.clipping import Clipping
from tests.support import broken

ALPHA = 1e-3  # false-alarm rate of one audit of the intact engine; seeds are fixed, so a test that passes stays so
PERSONS, VIEWS, BOTH = UnitShape(records=3), UnitShape(views=2), UnitShape(records=3, views=2)


def step(
    method: str, unit: UnitShape, clipping: Clipping = "flat", *, trials: int = 250, epsilon: float = 3.0
) -> WhiteBox:
    found = audited_method(method)
    return audit_step(found, clipping, epsilon=epsilon, delta=1e-5, trials=trials, seed=0, alpha=ALPHA, unit=unit)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("method", PRIVATE_METHODS)
def test_the_intact_engine_is_consistent_and_the_bound_close(method: str, clipping: Clipping) -> None:
    found = step(method, BOTH, clipping, trials=400, epsilon=8.0)
    assert found.violations == []
    assert 0.7 * found.claimed <= found.bound <= found.claimed <= 8.0


@pytest.mark.parametrize("unit", [PERSONS, VIEWS])
def test_persons_and_views_alone_are_consistent(unit: UnitShape) -> None:
    found = step("lsg", unit, trials=400, epsilon=8.0)
    assert found.violations == [] and 0.7 * found.claimed <= found.bound <= found.claimed


def test_many_steps_of_sampled_units_are_consistent() -> None:
    method = audited_method("lsg")
    found = audit_run(method, "flat", epsilon=8.0, delta=1e-5, steps=4, trials=80, seed=0, alpha=ALPHA, unit=BOTH)
    assert found.violations == [] and 0.1 * found.claimed <= found.bound <= found.claimed


def test_one_run_on_units_is_consistent() -> None:
    settings = {"epsilon": 8.0, "delta": 1e-5, "canaries": 40, "epochs": 2, "seed": 0, "alpha": ALPHA}
    found = audit_one_run(DPSGD(), "flat", **settings, unit=BOTH)  # type: ignore[arg-type]
    assert found.violations == [] and found.scores.shape == (40,) and 7 < found.claimed <= 8


def test_a_release_by_hand_is_the_step_itself() -> None:
    """The audit forms units by hand, too; here is that they are what the loader makes of them. The loader leaves
    out a record of a unit, which at such gradients changes nothing but the bias's small part."""
    seen = []
    for by_hand in (False, True):
        records = [blank(), blank()]
        for one in records:
            one.x.fill_(1e6)
            one.g.fill_(1.0)
        rig = Rig(audited_method("lsg"), "flat", records, noise_multiplier=1.0, seed=3, unit=BOTH)
        seen.append(rig.release(rig.clipped(records)) if by_hand else rig.epoch()[0].released)
        rig.close()
    assert torch.allclose(*seen, atol=1e-4)


BROKEN: list[tuple[Callable[[], AbstractContextManager[None]], UnitShape, str]] = [
    (broken.each_record_of_a_unit_clipped_by_itself, PERSONS, "moves the clipped sum by 3 times C"),
    (broken.each_record_of_a_unit_clipped_by_itself, VIEWS, "moves the clipped sum by 2 times C"),
    (broken.each_record_of_a_unit_clipped_by_itself, BOTH, "canary inside shows epsilon"),
    (broken.noise_for_one_of_three_records, PERSONS, "canary inside shows epsilon"),
    (broken.noise_for_one_of_three_records, PERSONS, "there is less noise than claimed"),
    (broken.factors_clipped_one_by_one, BOTH, "moves the clipped sum by 2."),
]


@pytest.mark.parametrize(("damage", "unit", "message"), BROKEN)
def test_a_broken_engine_is_flagged(
    damage: Callable[[], AbstractContextManager[None]], unit: UnitShape, message: str
) -> None:
    with damage():
        found = step("lsg", unit)
    assert any(message in violation for violation in found.violations), found.violations


def test_units_of_the_intact_engine_are_drawn_whole_and_as_poisson() -> None:
    found = audit_batches(epochs=20, seed=0, alpha=ALPHA, unit=BOTH)
    assert found.violations == [] and len(found.counts) == 6 and found.steps == 160
    assert found.counts[0].what == "units in batches" and found.sample_rate == 8 / 64


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken.a_unit_drawn_with_any_of_its_records, "units in batches"),
        (broken.records_of_a_unit_drawn_one_by_one, "a unit entered a step without all of its records"),
        (broken.shuffled_but_accounted_as_poisson, "exactly once in an epoch"),
    ],
)
def test_units_drawn_in_another_way_are_flagged(
    damage: Callable[[], AbstractContextManager[None]], message: str
) -> None:
    with damage():
        found = audit_batches(epochs=3, seed=0, alpha=ALPHA, unit=PERSONS)
    assert any(message in violation for violation in found.violations), found.violations
