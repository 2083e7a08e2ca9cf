"""Probes in a forward: do results of some samples depend on values of others? Gradients in, yes or no out."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


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


class Probes:
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

    def culprit(self, leaves: Sequence[Tensor]) -> str | None:
        """The first place whose samples depend on others' rows of the leaves, if there is one."""
        everywhere = range(len(self.places))
        if not leaves or not self._mix(everywhere, leaves):
            return None
        return next(self.places[i].name for i in everywhere if self._mix([i], leaves))

    def _mix(self, at: Collection[int], leaves: Sequence[Tensor]) -> bool:
        """Whether results of some samples have a gradient at other samples' leaves, at the probes with these numbers.

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
        sample = torch.arange(self._size, device=leaves[0].device)
        for bit in range((self._size - 1).bit_length()):
            for side in (0, 1):
                self._mine = (sample >> bit) % 2 == side
                found = torch.autograd.grad(edges, leaves, nothing, retain_graph=True, allow_unused=True)
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
