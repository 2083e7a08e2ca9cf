"""Any other module: vmap over its own forward, so that custom layers work out of the box.

Each sample runs as a batch of one with its own copy of the module's parameters (value + carrier). Modules inside it
keep their own rules, and see one sample's slice of their carriers.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lsg.layers.site import Site, site_of
from lsg.layers.slot import Slot


def fallback_forward(module: nn.Module, site: Site, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, sample by sample in one vectorised call."""

    def forward(values: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        site.bypass = True
        try:
            with _PaddingStays() if getattr(module, "padding_idx", None) is not None else nullcontext():
                return functional_call(module, values, args, kwargs)
        finally:
            site.bypass = False

    return _each_sample(site, forward, _inner_slots(module), args, kwargs)


def relative_bias_forward(module: Any, site: Site, *args: Any, **kwargs: Any) -> Any:
    """A relative attention bias (T5, MPNet): a table looked up by distance alone; each sample gets a bias of its own.

    (1, heads, queries, keys) becomes (B, heads, queries, keys), which broadcasts in the same places.
    """
    if site.caller is None:
        site.caller = _MethodCall(module, site.plain)
    caller = site.caller

    def compute(values: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return functional_call(caller, {f"module.{name}": value for name, value in values.items()}, args, kwargs)

    return _each_sample(site, compute, [], args, kwargs)


class _MethodCall(nn.Module):
    """Makes a method of a module callable with other parameter values."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)


def _each_sample(
    site: Site, run: Callable[..., Any], inner: list[Slot], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """run(parameter values, *args, **kwargs) for each sample as a batch of one, vectorised over the samples."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), None)
    if first is not None:
        site.batch.require(first.shape[0])
    size = site.batch.size
    batched = [isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size for leaf in leaves]
    if site.batched_inputs is not None and len(site.batched_inputs) == len(batched):
        batched = [now and before for now, before in zip(batched, site.batched_inputs, strict=True)]
    elif size is not None and size > 1:
        site.batched_inputs = batched

    def one_sample(own: dict[str, tuple[Tensor, ...]], borrowed: list[tuple[Tensor, ...]], *leaves: Any) -> Any:
        rows = [leaf.unsqueeze(0) if flag else leaf for leaf, flag in zip(leaves, batched, strict=True)]
        sample_args, sample_kwargs = pytree.tree_unflatten(rows, structure)
        values = _values(site.slots, own)
        with ExitStack() as stack:
            stack.enter_context(site.batch.of_one())
            for slot, carriers in zip(inner, borrowed, strict=True):
                stack.enter_context(slot.borrowed(tuple(c.unsqueeze(0) for c in carriers)))
            out = run(values, *sample_args, **sample_kwargs)
        return pytree.tree_map_only(Tensor, lambda t: t.squeeze(0), out)

    dims = (0, 0, *(0 if flag else None for flag in batched))
    own = {name: slot.carriers for name, slot in site.slots.items()}
    return vmap(one_sample, in_dims=dims, randomness="different")(own, [slot.carriers for slot in inner], *leaves)


class _PaddingStays(TorchFunctionMode):
    """Under vmap the row of an embedding's `padding_idx` would be trained, too: cuts it off from autograd."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | (kwargs or {})
        if func is F.embedding and named.get("padding_idx") is not None:
            weight = named["weight"]
            row = torch.arange(weight.shape[0], device=weight.device) == named["padding_idx"] % weight.shape[0]
            return F.embedding(named["input"], torch.where(row.unsqueeze(1), weight.detach(), weight))
        return func(*args, **(kwargs or {}))


def _values(slots: dict[str, Slot], carriers: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """One sample's parameters by local name, those of a split weight ("weight[0]", ...) in one."""
    values = {name: slot.moved_by(carriers[name]) for name, slot in slots.items()}
    for key, slot in slots.items():
        if slot.narrow is not None:
            name, part = key[: key.rindex("[")], values.pop(key)
            values[name] = torch.cat([values[name], part], slot.narrow[0]) if name in values else part
    return values


def _inner_slots(module: nn.Module) -> list[Slot]:
    """The slots of the modules inside, each once."""
    sites = [site_of(child) for child in module.modules() if child is not module]
    return list({id(slot): slot for site in sites if site for slot in site.slots.values()}.values())
