"""Several forwards for one batch of the loader: row i of each is taken for record i of the batch.

That is right for several views of the same records, whose gradients are then clipped as one, and for inputs that were
made without records, as a GAN's. It is wrong for other records: they would be trained on without having been sampled.
They look alike from here, so there is a warning, unless the inputs are the very same tensors.
"""

import warnings
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class SeveralForwards:
    """Watches the inputs of a model's forwards from one batch of the loader to the next."""

    def __init__(self) -> None:
        self._first: tuple[Tensor, int] | None = None  # and its version, which tells whether it was written to
        self._batch: object = None
        self._warned = False

    def note(self, inputs: Any, batch: object, rows: int | None) -> None:
        """A forward with gradients on. batch: stands for the loader's batch in flight, or what is left of it, of so
        many rows. Forwards of fewer are parts of it, and refused by the optimizer unless they add up."""
        first = next((leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()), None)
        if self._warned or first is None or len(first) != rows:
            return
        if batch is not self._batch or self._first is None:
            self._batch, self._first = batch, (first, first._version)
            return
        if not _same(*self._first, first):
            self._warned = True
            warnings.warn(
                "the model had two forwards with different inputs between two batches of the private loader: row i of "
                "each is taken for the same record, and their gradients are clipped as one. That is right for several "
                "views of the records of this batch, and for inputs made without records (a GAN's images). Other "
                "records must come from the loader, or run under torch.no_grad()",
                stacklevel=2,
            )


def _same(first: Tensor, version: int, other: Tensor) -> bool:
    return (
        other.data_ptr() == first.data_ptr()
        and other.shape == first.shape
        and other.stride() == first.stride()
        and other._version == version
    )
