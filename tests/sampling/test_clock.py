"""The clock by itself: which calls move it, which it refuses, what it tells the gradients."""

from typing import Any

import pytest

from lsg.errors import PrivacyError
from lsg.sampling.clock import Clock, Position


class Gradients:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.waiting = False
        self.sum: dict[str, Any] | None = None

    def pending(self) -> bool:
        return self.waiting

    def drop_pending(self) -> None:
        self.told.append("drop_pending")

    def renew(self) -> None:
        self.told.append("renew")

    def note_filler(self, filler: bool) -> None:
        pass

    def forget_sum(self) -> None:
        self.told.append("forget_sum")
        self.sum = None

    def partial_sum(self) -> dict[str, Any] | None:
        return self.sum

    def load_partial_sum(self, state: dict[str, Any]) -> None:
        self.sum = state


def test_steps_of_an_epoch_move_the_position() -> None:
    clock = Clock(Gradients())
    assert clock.epoch is None and clock.position() == Position(0)
    loop = clock.enter_epoch()
    for last, position in ((False, Position(0, 0, 1)), (True, Position(0, 1)), (True, Position(0, 2))):
        clock.begin_micro_batch(loop, size=3, last=last)
        clock.step_begins()
        clock.batch_stepped()
        assert clock.epoch == 0 and clock.position() == position
    assert clock.leave_epoch(loop) and not clock.leave_epoch(loop)
    assert clock.epoch is None and clock.position() == Position(1)


def test_a_batch_without_its_step_stops_the_clock() -> None:
    clock = Clock(Gradients())
    loop = clock.enter_epoch()
    clock.begin_micro_batch(loop, size=3, last=True)
    with pytest.raises(PrivacyError, match="next batch before"):
        clock.begin_micro_batch(loop, size=3, last=True)
    with pytest.raises(PrivacyError, match="a batch is under way"):
        clock.position()
    clock.part_collected(2)
    assert clock.batch_in_flight is not None and clock.batch_in_flight.left == 1


def test_a_newer_loop_ends_an_older_one_and_drops_its_sum() -> None:
    gradients = Gradients()
    clock = Clock(gradients)
    older = clock.enter_epoch()
    clock.begin_micro_batch(older, size=3, last=False)
    clock.step_begins()
    clock.batch_stepped()
    gradients.sum, gradients.told = {"vector": 1}, []
    clock.enter_epoch()
    assert gradients.sum is None and gradients.told[-3:] == ["forget_sum", "drop_pending", "renew"]
    assert clock.epochs_done == 1 and clock.done == (0, 0)
    with pytest.raises(PrivacyError, match="a newer epoch"):
        clock.check_stepped(older)


def test_an_epoch_without_a_step_does_not_count() -> None:
    clock = Clock(Gradients())
    clock.leave_epoch(clock.enter_epoch())
    assert clock.epochs_done == 0


def test_a_loaded_position_waits_for_the_next_loop() -> None:
    gradients = Gradients()
    clock, position = Clock(gradients), Position(2, 1, 1, {"vector": 1})
    clock.load(position)
    assert clock.loaded == position == clock.position() and gradients.sum is None
    clock.enter_epoch()
    assert clock.loaded is None and clock.done == (1, 1) and gradients.sum == {"vector": 1}
    assert clock.epoch == 2 and clock.position() == position
    with pytest.raises(PrivacyError, match="under way"):
        clock.check_idle()
