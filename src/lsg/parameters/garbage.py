"""Keeps Python's garbage collector off while a CUDA graph is recorded: freeing an older graph ends a recording."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collects garbage (graphs of an earlier run, say), then none until the end of the block. PyTorch does neither."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
