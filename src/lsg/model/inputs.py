"""What a model is given: how many records there are, and whether it was computed from the model's own results."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lsg.check.records import mapped
from lsg.errors import PrivacyError


def batch_size(inputs: Any) -> int | None:
    """The leading dimension of the first tensor among a model's inputs."""
    for leaf in _tensors(pytree.tree_leaves(inputs)):
        return leaf.shape[0]
    inside: list[Tensor] = []
    mapped(lambda tensor: inside.append(tensor) or tensor, inputs)  # type: ignore[func-returns-value]
    return next((tensor.shape[0] for tensor in inside if tensor.dim()), None)


def refuse_results(inputs: Any, carriers: Iterable[Tensor]) -> None:
    """What is done between two forwards of the model cannot be looked at."""
    own = {id(carrier) for carrier in carriers}
    for leaf in _tensors(pytree.tree_leaves(inputs)):
        if leaf.grad_fn is not None and _reaches(leaf, own):
            raise PrivacyError(
                f"an input of shape {tuple(leaf.shape)} was computed from results of the same model: what is done "
                "with them in between cannot be checked. Call the model twice inside the forward of one module, "
                "and give that to make_private"
            )


def _reaches(tensor: Tensor, leaves: set[int]) -> bool:
    """Whether autograd's graph leads from a tensor to one of the leaves."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


def _tensors(leaves: Iterable[Any]) -> Iterable[Tensor]:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            yield leaf
        elif isinstance(leaf, Mapping):  # transformers' BatchEncoding is a mapping that pytree does not know
            yield from _tensors(pytree.tree_leaves(dict(leaf)))
