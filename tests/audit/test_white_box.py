"""The intact engine passes every audit; each broken one is flagged. benchmarks/audit_bar.py is the same in large."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from lsg.audit.batches import audit_batches
from lsg.audit.report import audited_method
from lsg.audit.rig import Rig, blank
from lsg.audit.settings import CLIPPINGS
from lsg.audit.white_box import WhiteBox, audit_run, audit_step
from lsg.methods import PRIVATE_METHODS
from lsg.step.clipping import Clipping
from tests.support import broken

ALPHA = 1e-3  # false-alarm rate of one audit of the intact engine; seeds are fixed, so a test that passes stays so


def step(method: str, clipping: Clipping = "flat", *, trials: int = 250, epsilon: float = 3.0) -> WhiteBox:
    return audit_step(audited_method(method), clipping, epsilon=epsilon, delta=1e-5, trials=trials, seed=0, alpha=ALPHA)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("method", PRIVATE_METHODS)
def test_the_intact_engine_is_consistent_and_the_bound_close(method: str, clipping: Clipping) -> None:
    """At epsilon 8 fewer trials tell as much."""
    found = step(method, clipping, trials=400, epsilon=8.0)
    assert found.violations == []
    assert 0.7 * found.claimed <= found.bound <= found.claimed <= 8.0
    by_name = {o.canary: o for o in found.observed}
    if method == "dpsgd":
        assert "outside" not in by_name
    else:
        assert by_name["outside"].sensitivity.largest < 1e-9 and by_name["outside"].bounds.epsilon < 0.5


def test_many_steps_of_the_sampled_engine_are_consistent() -> None:
    found = audit_run(audited_method("lsg"), "flat", epsilon=8.0, delta=1e-5, steps=4, trials=80, seed=0, alpha=ALPHA)
    assert found.violations == [] and found.mechanism.steps == 4
    assert 0.1 * found.claimed <= found.bound <= found.claimed


def test_a_release_by_hand_is_the_step_itself() -> None:
    """The audit draws many releases of one sum; here is that each is what optimizer.step() does with it."""
    seen = []
    for by_hand in (False, True):
        records = [blank(), blank()]
        records[0].x.fill_(1.0)
        records[0].g.fill_(1.0)
        rig = Rig(audited_method("lsg"), "flat", records, noise_multiplier=1.0, seed=3)
        seen.append(rig.release(rig.clipped(records)) if by_hand else rig.epoch()[0].released)
        rig.close()
    assert torch.allclose(*seen)


BROKEN: list[tuple[Callable[[], AbstractContextManager[None]], str, str]] = [
    (broken.factors_clipped_one_by_one, "lsg", "moves the clipped sum by 2."),
    (broken.factors_clipped_one_by_one, "rgp", "moves the clipped sum by 2."),
    (broken.noise_forgotten_on_one_layer, "lsg", "along canary layer 'second' there is less noise"),
    (broken.noise_forgotten_on_one_layer, "dpsgd", "canary layer 'second' shows epsilon"),
    (broken.mask_after_the_norm, "lsg", "canary anywhere moves the clipped sum by only 0."),
    (broken.mask_after_the_norm, "sparse-dpsgd", "canary anywhere moves the clipped sum by only 0."),
    (broken.noise_divided_by_the_batch_size_twice, "lsg", "canary inside shows epsilon"),
    (broken.half_the_noise, "rgp", "canary inside shows epsilon"),
]


@pytest.mark.parametrize(("damage", "method", "message"), BROKEN)
def test_a_broken_engine_is_flagged(
    damage: Callable[[], AbstractContextManager[None]], method: str, message: str
) -> None:
    with damage():
        found = step(method)
    assert any(message in violation for violation in found.violations), found.violations


def test_batches_of_the_intact_engine_are_poisson() -> None:
    found = audit_batches(epochs=20, seed=0, alpha=ALPHA)
    assert found.violations == [] and len(found.counts) == 6 and found.steps == 160


def test_shuffled_batches_are_flagged() -> None:
    with broken.shuffled_but_accounted_as_poisson():
        found = audit_batches(epochs=3, seed=0, alpha=ALPHA)
    assert any("exactly once in an epoch" in message for message in found.violations), found.violations
    assert any("exactly the expected size" in message for message in found.violations)
