"""Networks that compute a private model's inputs and are trained through it, by another optimizer: a GAN's generator.

They get plain gradients. That is harmless where they make inputs up of noise, and the private model's weights are all
they learn from; but not if they make as many as there are records in the batch, which is secret, and least of all if
they see the records.
"""

import warnings
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lsg.sampling.clock import MicroBatch

_MOST_NODES = 10_000  # of a graph that are looked at


class TrainedFronts:
    """Watches the inputs of a model's forwards. Warns once, where two batches of different sizes have shown that the
    number of rows is that of the records: at one size it may be so by chance."""

    def __init__(self) -> None:
        self._sizes: set[int] = set()

    def note(self, inputs: Any, batch: MicroBatch) -> None:
        """A forward with gradients on, while `batch` is the last one that the loader has handed out."""
        if len(self._sizes) > 1 or batch.size is None or batch.size in self._sizes:
            return
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
        if not tensors or len(tensors[0]) != batch.size or not any(map(_comes_from_parameters, tensors)):
            return
        self._sizes.add(batch.size)
        if len(self._sizes) > 1:
            warnings.warn(
                "a network in front of the private model is trained through it, without clipping and noise, on as many "
                "rows as the loader handed out. If it sees records, its weights are not private: make it a part of the "
                "model. If it makes inputs up (a GAN's generator), the number of rows gives away how many records were "
                "drawn: let it make optimizer.expected_batch_size of them, once a logical step, by "
                "optimizer.on_logical_step(...)",
                stacklevel=2,
            )


def _comes_from_parameters(tensor: Tensor) -> bool:
    """Whether a backward through it would reach a parameter of some module."""
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        waiting += [before for before, _ in node.next_functions]
    return False
