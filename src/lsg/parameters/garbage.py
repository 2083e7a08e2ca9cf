"""While a CUDA graph is recorded nothing is collected: an older graph that is freed then ends the recording."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collects what is there (graphs of an earlier run, say), then nothing until the end. PyTorch does neither."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
