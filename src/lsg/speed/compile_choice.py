"""The planned number of steps and the time of the first ones in, one decision out: compile or not."""

import time
from collections.abc import Callable

COMPILING = 120.0  # seconds for two compilations, of two sizes: one took 17 to 66 s (results/bench, one H200)
SAVED = 0.15  # share of a recorded step that compiling saves: RoBERTa-base in bf16 0.17, WRN28-4 in tf32 0.17
_WARM_UP = 10  # steps before the timed ones: they make recordings and compare them
_TIMED = 10


def saving(seconds_a_step: float, steps_left: int) -> float | None:
    """Seconds that compiling saves in the steps left; None if that is not twice what compiling takes."""
    saved = SAVED * seconds_a_step * steps_left
    return saved if saved > 2 * COMPILING else None


class CompileChoice:
    """Is told when each logical step begins, times ten of them, and then decides once."""

    def __init__(self, steps: int, wait: Callable[[], None]) -> None:
        """steps: the number in the whole run. wait: returns when the device has finished its work."""
        self._steps, self._wait = steps, wait
        self._seen, self._began = 0, 0.0
        self._last: int | None = None

    def step_begins(self, step: int) -> float | None:
        """Returns the seconds that compiling will save, at the one step where that is decided; else None."""
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
