"""Transformers' attention masks in compiled and recorded forwards, where the model was given none.

Transformers may not look at a mask's values while it is traced, so it makes masks in full then, even where there is
nothing to look at. A causal model could do without. An encoder gets a mask that masks nothing, whose memory layout (a
last stride of 0) PyTorch's fused attention refuses: what takes its place keeps all probabilities in float32.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

_PLACE, _NAME = "transformers.masking_utils", "is_tracing"


@contextmanager
def without_needless_masks() -> Iterator[None]:
    """Meanwhile transformers makes masks as it does when nothing is traced, where it was given none."""
    masks = sys.modules.get(_PLACE)
    own = getattr(masks, _NAME, None)
    if own is None or hasattr(own, "_lsg_own"):  # another version of transformers, or done already
        yield
        return
    told = _where_there_is_a_mask(own)
    setattr(masks, _NAME, told)
    try:
        yield
    finally:
        if getattr(masks, _NAME) is told:
            setattr(masks, _NAME, own)


@lru_cache
def _where_there_is_a_mask(own: Callable[[Any], bool]) -> Callable[..., bool]:
    """Always the same function, which compiled code can recognise."""

    def is_tracing(tensor: Any = None) -> bool:
        return tensor is not None and own(tensor)

    is_tracing._lsg_own = own  # type: ignore[attr-defined]
    return is_tracing
