"""Whether to compile: the planned number of steps and the time of the first ones in, a decision out, once."""

import time
from collections.abc import Callable

COMPILING = 120.0  # seconds, with a second compilation for other sizes: one took 17 to 66 s (results/bench, one H200)
SAVED = 0.15  # of the time of a recorded step: 0.17 of RoBERTa-base's in bf16 and 0.17 of WRN28-4's in tf32
_WARM_UP = 10  # steps before those that are timed: they record, and compare what they recorded
_TIMED = 10


def saving(seconds_a_step: float, steps_left: int) -> float | None:
    """Seconds that compiling saves, itself not counted; None where it is not worth its time twice."""
    saved = SAVED * seconds_a_step * steps_left
    return saved if saved > 2 * COMPILING else None


class CompileChoice:
    """Told when each logical step begins; times some of them and then knows."""

    def __init__(self, steps: int, wait: Callable[[], None]) -> None:
        """steps: of the whole run. wait: until the device has done all that it was told."""
        self._steps, self._wait = steps, wait
        self._seen, self._began = 0, 0.0
        self._last: int | None = None

    def step_begins(self, step: int) -> float | None:
        """Returns, once and if it pays, how many seconds compiling will save."""
        if step == self._last or self._seen > _WARM_UP + _TIMED:
            return None
        self._last, self._seen = step, self._seen + 1
        if self._seen == _WARM_UP + 1:
            self._wait()
            self._began = time.perf_counter()
        elif self._seen == _WARM_UP + _TIMED + 1:
            self._wait()
            return saving((time.perf_counter() - self._began) / _TIMED, self._steps - step)
        return None
