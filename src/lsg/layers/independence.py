"""The sample-independence check: run once, on the first batch of several samples, before anything is trained.

Clipping bounds one sample's influence only if its gradient is its own. The carriers make that checkable: the inputs
of every layer and the outputs of the model that belong to one part of the batch must have exactly zero gradient with
respect to the carriers of the rest. For a weight that leaves the factors of its gradients (`calls.py`), the carriers
of its outputs stand for its own: they have a gradient wherever the weight has one.
"""

from collections.abc import Callable, Collection, Sequence
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
    probes = _Probes(size)
    hooks = [module.register_forward_pre_hook(_watch(module, probes), with_kwargs=True) for module in modules]
    devices = sorted({slot.parameter.device.index for slot in slots if slot.parameter.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), calls_apart(slots) as calls:
            output = forward(*args, **kwargs)
        probes.add("the model's output", _plain_tree(output))
        carriers = [carrier for slot in slots for carrier in slot.carriers]
        carriers += [carrier for of_slot in calls for carrier in of_slot.made or ()]
        everywhere = range(len(probes.tensors))
        if not probes.mix(everywhere, carriers):
            return
        culprit = next(probes.names[i] for i in everywhere if probes.mix([i], carriers))
    finally:
        for hook in (*hooks, *probes.hooks):
            hook.remove()
    raise PrivacyError(
        f"samples of a batch influence each other before {culprit}: per-sample clipping would not bound one "
        "sample's influence. Look for statistics or shuffles over the batch, inputs that are not batch first, "
        "or a layer that mixes samples, and remove it"
    )


def _watch(module: nn.Module, probes: "_Probes") -> Callable[..., None]:
    site = site_of(module)
    assert site is not None
    name = f"layer '{site.name}'"

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        probes.add(name, (args, kwargs))

    return hook


def _plain_tree(output: Any) -> Any:
    """transformers' outputs are ordered dicts that pytree may not know."""
    return tuple(output.values()) if isinstance(output, dict) else output


class _Probes:
    """Tensors of a forward, with a hook on each that adds a probe's gradient as a backward comes by.

    The gradients are made one at a time: those of all tensors together would need as much memory as all of them.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.hooks: list[Any] = []
        self._at: Collection[int] = ()  # the probes in use
        self._mine: Tensor | None = None  # the samples that they look at

    def add(self, name: str, tree: Any) -> None:
        for tensor in pytree.tree_leaves(tree):
            if self._comparable(tensor):
                self.hooks.append(tensor.register_hook(self._hook(len(self.tensors), tensor.detach())))
                self.names.append(name)
                self.tensors.append(tensor)

    def _comparable(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor) and value.requires_grad and value.dim() > 0 and value.shape[0] % self._size == 0
        )

    def _hook(self, number: int, values: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda gradient: gradient + self._gradient(values) if number in self._at else gradient

    def _gradient(self, values: Tensor) -> Tensor:
        """Of a weighted sum over the samples looked at, with unequal weights, so that no symmetry (a softmax sums to
        one) hides a dependence. A broken sample's nans have no weight."""
        assert self._mine is not None
        weights = torch.linspace(0.5, 1.5, values.numel(), device=values.device).cos().view_as(values)
        rows = self._mine.repeat_interleave(values.shape[0] // self._size).view(-1, *[1] * (values.dim() - 1))
        return torch.where(rows & ~values.isnan(), weights, 0.0).to(values.dtype)

    def mix(self, at: Collection[int], carriers: Sequence[Tensor]) -> bool:
        """Whether results of some samples have a gradient at the carriers of others, at the probes with these numbers.

        The batch is split in two by each bit of the samples' numbers, so that any two samples are on different sides
        once.
        """
        self._at = at
        tensors = [self.tensors[i] for i in at]
        if not tensors:
            return False
        nothing = [tensor.new_zeros(()).expand_as(tensor) for tensor in tensors]  # brings the backward to each probe
        sample = torch.arange(self._size, device=carriers[0].device)
        for bit in range((self._size - 1).bit_length()):
            for side in (0, 1):
                self._mine = (sample >> bit) % 2 == side
                found = torch.autograd.grad(tensors, carriers, nothing, retain_graph=True, allow_unused=True)
                mixed = any(g is not None and _nonzero(g[~self._mine]) for g in found)
                del found
                if mixed:
                    return True
        return False


def _nonzero(gradient: Tensor) -> bool:
    # A broken sample (inf, nan) gives 0 * inf = nan, which is no evidence of mixing.
    return bool((gradient.nan_to_num(0.0) != 0).any())
