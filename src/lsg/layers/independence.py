"""The sample-independence check: run once, on the first batch of several samples, before anything is trained.

Clipping bounds one sample's influence only if its gradient is its own. The carriers make that checkable: the inputs
of every layer and the outputs of the model that belong to one part of the batch must have exactly zero gradient with
respect to the carriers of the rest. For a weight that leaves the factors of its gradients (`calls.py`), the carriers
of its outputs stand for its own: they have a gradient wherever the weight has one.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lsg.errors import PrivacyError
from lsg.layers.calls import Calls
from lsg.layers.site import site_of
from lsg.layers.slot import Slot, calls_apart

_one_at_a_time = threading.RLock()


def check_independence(
    forward: Callable[..., Any], modules: Sequence[nn.Module], slots: Sequence[Slot], size: int, args: Any, kwargs: Any
) -> None:
    """Raise PrivacyError, naming the first layer whose input mixes samples, if any does. `forward` is the model's."""
    # A compiler cannot put probes into what it compiles. A few models cannot do without one (`torch.cond`).
    culprit, compiled = None, False
    try:
        with _eagerly():
            culprit = _culprit(forward, modules, slots, size, args, kwargs)
    except PrivacyError:
        raise
    except Exception:
        compiled = True
    if compiled:  # only here, past the error, is what it held free
        culprit = _culprit(forward, modules, slots, size, args, kwargs)
    if culprit is not None:
        raise PrivacyError(
            f"samples of a batch influence each other before {culprit}: per-sample clipping would not bound one "
            "sample's influence. Look for statistics or shuffles over the batch, inputs that are not batch first, "
            "or a layer that mixes samples, and remove it"
        )


@contextmanager
def _eagerly() -> Iterator[None]:
    with _one_at_a_time, torch.compiler.set_stance("force_eager"):  # which holds for all threads
        yield


def _culprit(
    forward: Callable[..., Any], modules: Sequence[nn.Module], slots: Sequence[Slot], size: int, args: Any, kwargs: Any
) -> str | None:
    """The first place where samples have been mixed."""
    probes = _Probes(size)
    try:
        calls = _probed(forward, modules, slots, probes, args, kwargs)
        carriers = [carrier for slot in slots for carrier in slot.carriers]
        carriers += [carrier for of_slot in calls for carrier in of_slot.made or ()]
        everywhere = range(len(probes.places))
        if not probes.mix(everywhere, carriers):
            return None
        return next(probes.places[i].name for i in everywhere if probes.mix([i], carriers))
    finally:
        probes.remove()


def _probed(
    forward: Callable[..., Any],
    modules: Sequence[nn.Module],
    slots: Sequence[Slot],
    probes: "_Probes",
    args: Any,
    kwargs: Any,
) -> list[Calls]:
    """One forward with a probe at every layer's inputs and at the outputs; the calls that it made of each slot."""
    hooks = [module.register_forward_pre_hook(_watch(module, probes), with_kwargs=True) for module in modules]
    devices = sorted({slot.parameter.device.index for slot in slots if slot.parameter.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), calls_apart(slots) as calls:
            output = forward(*args, **kwargs)
    finally:
        for hook in hooks:  # before any backward, in which checkpoints run layers again
            hook.remove()
    probes.add("the model's output", output)
    return calls


def _watch(module: nn.Module, probes: "_Probes") -> Callable[..., None]:
    site = site_of(module)
    assert site is not None
    name = f"layer '{site.name}'"

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        probes.add(name, (args, kwargs))

    return hook


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Wherever they are: in mappings, sequences and sets, and in the attributes of other objects."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, str | bytes | type | nn.Module):
        seen.add(id(value))
        if isinstance(value, Mapping):
            inside: Iterable[Any] = value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            inside = value
        else:
            inside = vars(value).values() if hasattr(value, "__dict__") else ()
        for part in list(inside):
            yield from _tensors_in(part, seen)


@dataclass(frozen=True)
class _Place:
    """Where a probe is: a tensor's place in autograd's graph, whatever becomes of the tensor itself, and its looks."""

    name: str
    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    broken: Tensor | None  # where its values are nan


class _Probes:
    """Places in a forward, with a hook at each that adds a probe's gradient as a backward comes by.

    The gradients are made one at a time: those of all places together would need as much memory as all their tensors.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.places: list[_Place] = []
        self._hooks: list[Any] = []
        self._at: Collection[int] = ()  # the probes in use
        self._mine: Tensor | None = None  # the samples that they look at

    def add(self, name: str, values: Any) -> None:
        for tensor in _tensors_in(values, set()):
            if self._comparable(tensor):
                broken = tensor.detach().isnan()
                looks = (tensor.shape, tensor.dtype, tensor.device, broken if bool(broken.any()) else None)
                # First the edge: it brings a view up to date whose base was written to. A hook on one that is not goes
                # to its old place, or ends the process (pytorch issue 196459).
                edge = get_gradient_edge(tensor)
                self._hooks.append(tensor.register_hook(self._hook(len(self.places))))
                self.places.append(_Place(name, edge, *looks))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _comparable(self, value: Tensor) -> bool:
        return value.requires_grad and value.dim() > 0 and value.shape[0] % self._size == 0

    def _hook(self, number: int) -> Callable[[Tensor], Tensor]:
        return lambda gradient: gradient + self._gradient(number) if number in self._at else gradient

    def _gradient(self, number: int) -> Tensor:
        """Of a weighted sum over the samples looked at. Weights differ from entry to entry and from probe to
        probe, in any precision: no symmetry (a softmax sums to one, a pair to nothing) hides a
        dependence. A broken sample's nans have no weight.
        """
        place = self.places[number]
        assert self._mine is not None
        shape = place.shape
        rows = self._mine.repeat_interleave(shape[0] // self._size).view(-1, *[1] * (len(shape) - 1))
        wanted = rows if place.broken is None else rows & ~place.broken
        weights = _weights(shape, number, place.device)
        if place.dtype.is_complex:
            weights = torch.complex(weights, _weights(shape, ~number, place.device))
        return torch.where(wanted, weights, 0.0).to(place.dtype)

    def mix(self, at: Collection[int], carriers: Sequence[Tensor]) -> bool:
        """Whether results of some samples have a gradient at the carriers of others, at the probes with these numbers.

        The batch is split in two by each bit of the samples' numbers, so that any two samples are on different sides
        once.
        """
        self._at = at
        places = [self.places[i] for i in at]
        if not places:
            return False
        # Nothing, but it brings the backward to each probe.
        nothing = [torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape) for p in places]
        edges = [place.edge for place in places]
        sample = torch.arange(self._size, device=carriers[0].device)
        for bit in range((self._size - 1).bit_length()):
            for side in (0, 1):
                self._mine = (sample >> bit) % 2 == side
                found = torch.autograd.grad(edges, carriers, nothing, retain_graph=True, allow_unused=True)
                mixed = any(g is not None and _nonzero(g[~self._mine]) for g in found)
                del found
                if mixed:
                    return True
        return False


def _weights(shape: torch.Size, number: int, device: torch.device) -> Tensor:
    """Between 1 and 2: multiples of the golden ratio, modulo 1. Neighbours are far apart, in bfloat16 too."""
    entries = torch.arange(shape.numel(), device=device, dtype=torch.int32)
    turned = entries.mul_(-1640531527).add_(number * 1013904223 % 2**31)  # 2**32 is a full turn
    return turned.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().div_(2**24).add_(1.0).view(shape)


def _nonzero(gradient: Tensor) -> bool:
    # A broken sample (inf, nan) gives 0 * inf = nan, which is no evidence of mixing.
    return bool((gradient.nan_to_num(0.0) != 0).any())
