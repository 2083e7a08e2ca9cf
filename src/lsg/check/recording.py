"""Forwards of a model without rules, recorded: every call of a layer, what went in and what came out; and compared with
a recorded one, in which some of the records were others."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lsg.check.kept_state import tensors_in
from lsg.check.ownership import Trail, alike, lowered_precision
from lsg.layers.fallback import fallback_forward
from lsg.layers.made_once import one_each_forward
from lsg.layers.patched_module import PatchedModule
from lsg.layers.samples import leaves_of
from lsg.layers.subclasses import FUNCTION, Listen, intercepted_forward


@dataclass
class Call:
    """One call of a layer: what went in and what came out, as leaves, tensors with their trails."""

    patched: PatchedModule
    number: int  # among the patched module's calls in the forward
    inputs: list[Any]
    kind: str  # of module
    outputs: list[Any] = field(default_factory=list)
    of_fewer: list[Any] = field(default_factory=list)  # what went in with fewer records

    @property
    def may_mix(self) -> bool:
        """Whether nobody knows what the module computes: layers with a rule of their own keep apart what is apart."""
        return self.patched.rule in (fallback_forward, one_each_forward, intercepted_forward)


OUTPUT = "before the model's output"


class Place(NamedTuple):
    """Where a tensor was, in words; and the patched module whose call it went into or came out of.

    apart: whether that is inside a module that runs sample by sample, so that its rule need not find the samples.
    """

    where: str
    trail: Trail
    patched: PatchedModule | None
    apart: bool = False


class Recording:
    """The calls of one forward, kept; or compared with those of a forward before it."""

    def __init__(
        self,
        reference: "Recording | None" = None,
        run: int | None = None,
        changed: Collection[int] = (),
        size: int = 0,
    ) -> None:
        """run: the number of the run that is compared, in which so many of `size` records are changed; None for a batch
        of fewer records."""
        self.calls: list[Call] = []
        self.places: list[Place] = []  # all of them as they came
        self.decisions: list[Trail] = []  # numbers that the model looked at
        self.output: list[Trail] = []
        self.differs: PatchedModule | None = (
            None  # the first patched module that was called in another way than in the reference
        )
        self._reference, self._run, self._changed, self._size = reference, run, frozenset(changed), size
        self._position = 0
        self.precision: torch.dtype | None = None  # what layers computed in, where that is below their tensors' own
        self._apart = 0  # modules running now whose rule lets them run sample by sample
        self._found: list[tuple[Trail, Tensor]] = []  # what is to be compared when the forward is over

    def __call__(self, module: nn.Module, patched: PatchedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():  # what is done here is no part of the model
            begun = self._begin(module, patched, leaves_of(args, kwargs))
        self._apart += patched.rule is fallback_forward
        if patched.rule is intercepted_forward:
            with Listen(module, lambda x, out: self._end(self._begin(module, patched, [FUNCTION, x]), [out])):
                out = patched.own_forward(*args, **kwargs)
        else:
            out = patched.own_forward(*args, **kwargs)
        self._apart -= patched.rule is fallback_forward
        with torch._C.DisableTorchFunction():
            self._end(begun, pytree.tree_leaves(out))
        return out

    def finish(self, output: Any) -> None:
        found = list(tensors_in(output, set()))
        if self._reference is not None and self._position < len(self._reference.calls):
            self.differs = self.differs or self._reference.calls[self._position].patched
        if self._reference is None:
            self.output = [_kept(tensor) for tensor in found]
            self.places += [Place(OUTPUT, trail, None) for trail in self.output]
        elif len(found) == len(self._reference.output):
            for trail, tensor in zip(self._reference.output, found, strict=True):
                self._note(trail, tensor)

    def decide(self, number: Tensor) -> None:
        """The model looks at a number, to compare it or to do something else with it in Python."""
        if self._reference is None:
            self.decisions.append(_kept(number))
        elif self._run is not None and len(self.decisions) < len(self._reference.decisions):
            self._note(self._reference.decisions[len(self.decisions)], number)
            self.decisions.append(self._reference.decisions[len(self.decisions)])

    def _begin(self, module: nn.Module, patched: PatchedModule, leaves: list[Any]) -> Call | None:
        number = patched.next_call()
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.precision = self.precision or lowered_precision(leaf.device.type)
        if self._reference is None:
            call = Call(patched, number, [_kept(leaf) for leaf in leaves], type(module).__name__)
            self.calls.append(call)
            where = f"before layer '{patched.name}'"
            self.places += [
                Place(where, leaf, patched, self._apart > 0) for leaf in call.inputs if isinstance(leaf, Trail)
            ]
            return call
        position, self._position = self._position, self._position + 1
        known = self._reference.calls
        if (
            position >= len(known)
            or known[position].patched is not patched
            or len(known[position].inputs) != len(leaves)
        ):
            self.differs = self.differs or patched
            return None
        if self._run is None:
            known[position].of_fewer = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._note_all(known[position].inputs, leaves)
        return known[position]

    def _end(self, call: Call | None, leaves: list[Any]) -> None:
        if self._reference is None:
            assert call is not None
            call.outputs = [_kept(leaf) for leaf in leaves]
            if not call.may_mix:
                return
            where = f"in layer '{call.patched.name}' ({call.kind})"
            self.places += [
                Place(where, leaf, call.patched, self._apart > 0) for leaf in call.outputs if isinstance(leaf, Trail)
            ]
        elif call is not None and call.may_mix:
            self._note_all(call.outputs, leaves)

    def _note_all(self, kept: list[Any], leaves: list[Any]) -> None:
        for trail, leaf in zip(kept, leaves, strict=False):
            if isinstance(trail, Trail) and isinstance(leaf, Tensor):
                self._note(trail, leaf)

    def _note(self, trail: Trail, tensor: Tensor) -> None:
        if self._run is None:
            trail.of_fewer = tensor.detach().clone()
        elif trail.value.shape == tensor.shape:
            self._found.append((trail, tensor.detach().clone()))
        else:
            trail.reshaped = True

    def settle(self) -> None:
        """The forward is over: note what it changed.

        Nearly all tensors have their samples first and are the same where records are. Then no entry is looked at, and
        whole rows count as changed. All such tensors of a kind are compared at once: on a GPU each question costs time.
        Where the batch of fewer records has shown that the samples are in another dimension, each entry is looked at:
        rows of positions may be the same by chance, of indices above all.
        """
        found, self._found = self._found, []
        if self._run is None:
            return
        kept = [i for i in range(self._size) if i not in self._changed]
        groups: dict[Any, list[tuple[Trail, Tensor]]] = {}
        for trail, tensor in found:
            if tensor.shape[:1] == (self._size,) and self._size and not trail.is_turned:
                groups.setdefault((tensor.dtype, tensor.device), []).append((trail, tensor))
            else:
                trail.compare(tensor, self._run)
        for (_, device), pairs in groups.items():
            rows = [int(i in self._changed) << self._run for i in range(self._size)]
            bits = torch.tensor(rows, dtype=torch.int32, device=device)
            same = all(torch.equal(_row([t.value for t, _ in pairs], i), _row([x for _, x in pairs], i)) for i in kept)
            for trail, tensor in pairs:
                if same or alike(trail.value[kept], tensor[kept]):
                    if self._changed:
                        trail.note(bits.view(-1, *[1] * (tensor.dim() - 1)))
                else:
                    trail.compare(tensor, self._run)


def _row(tensors: list[Tensor], i: int) -> Tensor:
    """Row i of each of them, as one."""
    return torch.cat([tensor[i].reshape(-1) for tensor in tensors])


_LOOKS = {"__bool__", "__float__", "__int__", "__index__", "item", "tolist"}
_COMPARES = {"__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__", "gt", "lt", "ge", "le", "eq", "ne"}


class Decisions(TorchFunctionMode):
    """Tells of single real numbers that a model looks at in Python, or compares."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _LOOKS | _COMPARES:
            for value in args[:2]:
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1:
                    self._tell(value)
        return func(*args, **(kwargs or {}))


def _kept(leaf: Any) -> Any:
    return Trail(leaf.detach().clone(), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
