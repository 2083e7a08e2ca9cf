"""One cast for layers that take the same input in a lower precision: queries, keys and values keep one copy, not three.

Only values are shared. Each layer differentiates with respect to the input itself, so gradients still meet in the
input's own precision.
"""

import weakref

import torch
from torch import Tensor

from lsg.kernels.optional_triton import untransformed


class LastCast:
    """Remembers the last cast as long as some layer keeps it for its backward, and no longer."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]] | None = None  # input, its version, the cast

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in that precision, cut off from autograd."""
        if self._last is not None:
            source, version, cast = self._last[0](), self._last[1], self._last[2]()
            if source is x and version == x._version and cast is not None and cast.dtype == dtype:
                return cast
        cast = x.detach().to(dtype)
        self._last = (weakref.ref(x), x._version, weakref.ref(cast))
        return cast


def can_share(x: Tensor) -> bool:
    """Only what this forward has computed: an input of the model may be the same object in a later recording, which
    must do its own cast. A compiler does as it likes, and vmap wraps tensors."""
    return untransformed() and x.grad_fn is not None  # in this order: to ask for it ends a compiled graph
