"""What the three accountants share when they call NumPy, Opacus and dp-accounting. These are imported on first use."""

import contextlib
import warnings
from collections.abc import Iterator

# How a library may fail numerically; the next, sturdier accountant then answers.
NUMERICAL_FAILURES = (ArithmeticError, ValueError, RuntimeError, IndexError, MemoryError)


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
