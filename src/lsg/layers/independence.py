"""The sample-independence check: run once, on the first batch of several samples, before anything is trained.

Clipping bounds one sample's influence only if its gradient is its own. The carriers make that checkable: the inputs
of every layer and the outputs of the model that belong to one part of the batch must have exactly zero gradient with
respect to the carriers of the rest. For a weight that leaves the factors of its gradients (`calls.py`), the carriers
of its outputs stand for its own: they have a gradient wherever the weight has one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lsg.errors import PrivacyError
from lsg.layers.site import site_of
from lsg.layers.slot import Slot, calls_apart


def check_independence(
    forward: Callable[..., Any], modules: Sequence[nn.Module], slots: Sequence[Slot], size: int, args: Any, kwargs: Any
) -> None:
    """Raise PrivacyError, naming the first layer whose input mixes samples, if any does. `forward` is the model's."""
    seen: list[tuple[str, Tensor]] = []
    hooks = [module.register_forward_pre_hook(_watch(module, size, seen), with_kwargs=True) for module in modules]
    devices = sorted({slot.parameter.device.index for slot in slots if slot.parameter.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), calls_apart(slots) as calls:
            output = forward(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    seen += [("the model's output", t) for t in pytree.tree_leaves(_plain_tree(output)) if _comparable(t, size)]
    carriers = [carrier for slot in slots for carrier in slot.carriers]
    carriers += [carrier for of_slot in calls for carrier in of_slot.made or ()]
    if not _mixes([tensor for _, tensor in seen], carriers, size):
        return
    culprit = next(name for name, tensor in seen if _mixes([tensor], carriers, size))
    raise PrivacyError(
        f"samples of a batch influence each other before {culprit}: per-sample clipping would not bound one "
        "sample's influence. Look for statistics or shuffles over the batch, inputs that are not batch first, "
        "or a layer that mixes samples, and remove it"
    )


def _watch(module: nn.Module, size: int, seen: list[tuple[str, Tensor]]) -> Callable[..., None]:
    site = site_of(module)
    assert site is not None
    name = f"layer '{site.name}'"

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.extend((name, t) for t in pytree.tree_leaves((args, kwargs)) if _comparable(t, size))

    return hook


def _plain_tree(output: Any) -> Any:
    """transformers' outputs are ordered dicts that pytree may not know."""
    return tuple(output.values()) if isinstance(output, dict) else output


def _comparable(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.dim() > 0 and value.shape[0] % size == 0


def _mixes(tensors: Sequence[Tensor], carriers: Sequence[Tensor], size: int) -> bool:
    """Whether results of some samples have a gradient at the carriers of others.

    The batch is split in two by each bit of the samples' numbers, so that any two samples are on different sides once.
    """
    sample = torch.arange(size, device=carriers[0].device)
    rows = [tensor.unflatten(0, (size, -1)) for tensor in tensors]
    for bit in range((size - 1).bit_length()):
        for side in (0, 1):
            mine = (sample >> bit) % 2 == side
            total = sum(_probe(row[mine]) for row in rows)
            if not isinstance(total, Tensor) or not total.requires_grad:
                return False
            grads = torch.autograd.grad(total, carriers, retain_graph=True, allow_unused=True)
            if any(g is not None and _nonzero(g[~mine]) for g in grads):
                return True
    return False


def _nonzero(gradient: Tensor) -> bool:
    # A broken sample (inf, nan) gives 0 * inf = nan, which is no evidence of mixing.
    return bool((gradient.nan_to_num(0.0) != 0).any())


def _probe(values: Tensor) -> Tensor:
    """A weighted sum with unequal weights, so that no symmetry (a softmax sums to one) hides a dependence."""
    weights = torch.linspace(0.5, 1.5, values.numel(), device=values.device, dtype=torch.float64)
    return (values.double() * weights.view_as(values).cos()).nansum()
