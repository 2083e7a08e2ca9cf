"""What the three accountants share when they call NumPy, Opacus and dp-accounting. These are imported on first use."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from lsg.accounting.phases import Phase

# How a library may fail numerically; the next, sturdier accountant then answers.
NUMERICAL_FAILURES = (ArithmeticError, ValueError, RuntimeError, IndexError, MemoryError)


def dp_event(phase: Phase) -> Any:
    """One step of a phase, as dp-accounting describes it."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(phase.noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(phase.sample_rate, gaussian)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries: overflow in a tail and orders left out are expected, and their results are checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import numpy as np
        from absl import logging

        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)
        try:
            with np.errstate(all="ignore"):
                yield
        finally:
            logging.set_verbosity(verbosity)
