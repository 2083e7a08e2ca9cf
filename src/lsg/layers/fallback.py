"""Any other module: vmap over its own forward, so that custom layers work out of the box.

Each sample runs as a batch of one with its own copy of the module's parameters (value + carrier). Modules inside it
keep their own rules, and see one sample's slice of their carriers.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lsg.errors import ConfigurationError, PrivacyError, first_line, is_out_of_memory
from lsg.layers.install import patch_of
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rule import Rule
from lsg.layers.samples import COUNT, WHOLE, Axis, SampleAxis, SamplePlaces
from lsg.parameters.slot import Slot

LOOKUP = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")  # of F.embedding


def fallback_forward(module: nn.Module, patched: PatchedModule, places: SamplePlaces, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, sample by sample in one vectorised call."""
    given = [
        leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, nn.Module)
    ]  # it may call those, too
    return each_sample(module, patched, places, _inner_slots(module, given), args, kwargs)


def each_sample(
    module: nn.Module,
    patched: PatchedModule,
    places: SamplePlaces,
    inner: list[Slot],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The own method for each sample as a batch of one, with parameters of its own, vectorised over the samples."""
    caller, size = patched.caller(module), patched.size
    leaves, structure = pytree.tree_flatten((args, list(kwargs.values())))
    axes = [places.input(i) for i in range(len(leaves))]
    leaves = [1 if axis is COUNT else leaf for axis, leaf in zip(axes, leaves, strict=True)]
    shape_of_results: list[Any] = []  # leaves, with _A_TENSOR in a tensor's place, and their structure

    def one_sample(own: dict[str, tuple[Tensor, ...]], borrowed: list[tuple[Tensor, ...]], *parts: Any) -> list[Tensor]:
        rows = [
            axis.one(part) if isinstance(axis, SampleAxis) else part for axis, part in zip(axes, parts, strict=True)
        ]
        sample_args, sample_values = pytree.tree_unflatten(rows, structure)
        values = {f"module.{name}": value for name, value in _values(patched.slots, own).items()}
        with ExitStack() as stack:
            stack.enter_context(patched.batch.of_one())
            for slot, carriers in zip(inner, borrowed, strict=True):
                stack.enter_context(slot.borrowed(tuple(c.unsqueeze(0) for c in carriers)))
            stack.enter_context(_DifferentiableMasks())
            if isinstance(module, nn.Embedding):
                stack.enter_context(_PaddingStays(patched.name))
            out = functional_call(caller, values, sample_args, dict(zip(kwargs, sample_values, strict=True)))
        found, out_structure = pytree.tree_flatten(out)
        shape_of_results[:] = [_A_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in found], out_structure
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    split = [_part(axis, leaf, size) for axis, leaf in zip(axes, leaves, strict=True)]
    parts, dims = [part for part, _ in split], [dim for _, dim in split]
    own = {name: slot.carriers for name, slot in patched.slots.items()}
    with _named_errors(module, patched):
        results = iter(
            vmap(one_sample, in_dims=(0, 0, *dims), randomness="different")(own, [s.carriers for s in inner], *parts)
        )
        found, out_structure = shape_of_results
        joined = [
            places.output(i).collect(next(results)) if leaf is _A_TENSOR else leaf for i, leaf in enumerate(found)
        ]
    return pytree.tree_unflatten(joined, out_structure)


_A_TENSOR = object()


def _part(axis: Axis, leaf: Any, size: int) -> tuple[Any, int | None]:
    """An argument as vmap gets it, and along which dimension it has samples."""
    if isinstance(axis, SampleAxis):
        return axis.parts(leaf, size), axis.dim + 1
    if axis is WHOLE and isinstance(leaf, Tensor):
        return leaf.unsqueeze(0), 0
    return leaf, None


@contextmanager
def _named_errors(module: nn.Module, patched: PatchedModule) -> Iterator[None]:
    """What vmap cannot do is told as a refusal of the layer."""
    try:
        yield
    except (PrivacyError, ConfigurationError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise PrivacyError(
            f"layer '{patched.name}' ({type(module).__name__}) cannot run sample by sample, as its parameters need: "
            f"{first_line(error)}. Freeze its parameters, or build it of layers that lsg has rules for"
        ) from error


class _DifferentiableMasks(TorchFunctionMode):
    """Under vmap PyTorch's attention does not see that a mask wants a gradient, and takes kernels that have none."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if func is F.scaled_dot_product_attention and mask is not None and mask.is_floating_point():
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _PaddingStays(TorchFunctionMode):
    """Under vmap the row of an embedding's `padding_idx` would be trained, too: cuts it off from autograd."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.embedding:
            return func(*args, **kwargs)
        call = arguments(LOOKUP, args, kwargs)
        refuse_batch_dependent(self._name, call)
        weight, padding_idx = call["weight"], call["padding_idx"]
        if padding_idx is not None:
            row = torch.arange(weight.shape[0], device=weight.device) == padding_idx % weight.shape[0]
            weight = torch.where(row.unsqueeze(1), weight.detach(), weight)
        return F.embedding(call["input"], weight)


def arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of a call of a function with these parameters, by name; None where it was not given."""
    return dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs


def refuse_batch_dependent(name: str, call: dict[str, Any]) -> None:
    """Arguments of `F.embedding` that couple the samples of a batch, or write what they look up."""
    for argument in ("max_norm", "scale_grad_by_freq"):
        if call[argument]:
            raise PrivacyError(f"layer '{name}' looks up with {argument}, which depends on the batch; turn it off")


def _values(slots: dict[str, Slot], carriers: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """One sample's parameters by local name, those of a split weight ("weight[0]", ...) in one; a parameter with two
    names by the first, as `functional_call` ties them."""
    once = {id(slot): (name, slot) for name, slot in reversed(slots.items())}
    values = {name: slot.moved_by(carriers[name]) for name, slot in reversed(once.values())}
    for key, slot in slots.items():
        if slot.narrow is not None:
            name, part = key[: key.rindex("[")], values.pop(key)
            values[name] = torch.cat([values[name], part], slot.narrow[0]) if name in values else part
    return values


def _inner_slots(module: nn.Module, given: list[nn.Module]) -> list[Slot]:
    """The slots of the modules inside, and of those given as arguments, each once."""
    inside = [child for whole in (module, *given) for child in whole.modules() if child is not module]
    patched_modules = map(patch_of, inside)
    return list({id(slot): slot for patched in patched_modules if patched for slot in patched.slots.values()}.values())


FALLBACK = Rule(fallback_forward, known=None)
