"""A patched module: what belongs to a module whose forward goes through a rule. `install.py` puts it on.

All that changes while a model is trained is changed by the methods here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lsg.errors import PrivacyError
from lsg.layers.instance_methods import nothing
from lsg.layers.samples import ONE_SAMPLE, Axis, SamplePlaces, signature
from lsg.parameters.cast_cache import LastCast
from lsg.parameters.slot import Slot

RuleForward = Callable[
    ..., Any
]  # (module, patched module, places, *args, **kwargs) -> what the module's own forward returns
Watch = Callable[[nn.Module, "PatchedModule", tuple[Any, ...], dict[str, Any]], Any]  # runs the module's own forward
Witness = Callable[
    ["PatchedModule", int, Any], None
]  # what a rule returned, and for which of the patched module's calls


class Batch:
    """The micro-batch in flight; one object shared by all patched modules of an engine."""

    def __init__(self) -> None:
        self.size: int | None = None  # samples that carriers are made for
        self.records: int | None = None  # without the rows that padding adds
        self.filler = False  # whether it is one that keeps the ranks in step, of which nothing is kept
        self.in_forward = False  # whether the model's own forward is running
        self.last_cast = LastCast()
        # Whether norms may lay out their output channels last: None before the model was seen to bear it.
        self.channels_last_norms: bool | None = None
        self._has_channels_last = False  # whether a norm has done so
        self.watch: Watch | None = None  # while the check runs the model without its rules
        self.witness: Witness | None = None  # while it compares what rules return

    def note_channels_last(self) -> None:
        """A norm lays out its output channels last, which PyTorch's own would not."""
        self._has_channels_last = True

    @property
    def may_blame_layout(self) -> bool:
        """Whether a failure of the model may come from a norm's output, laid out in another way than PyTorch does."""
        return bool(self.channels_last_norms) and self._has_channels_last

    @contextmanager
    def of_one(self) -> Iterator[None]:
        """Inside vmap each module sees a batch of one sample."""
        size, witness, self.size, self.witness = self.size, self.witness, 1, None
        try:
            yield
        finally:
            self.size, self.witness = size, witness


class UnknownCall(BaseException):
    """A layer was called in a way that the check has not seen. No Exception: a model must not catch it."""

    def __init__(self, patched: "PatchedModule", leaves: list[Any]) -> None:
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        super().__init__(f"layer '{patched.name}' with inputs {shapes}")


class PatchedModule:
    """What a module's rule needs: its name, its slots by local name, its own forward and the batch in flight.

    for_speed: whether the patched module trains nothing and is there for speed alone, in evaluation too.
    """

    def __init__(
        self,
        name: str,
        slots: dict[str, Slot],
        batch: Batch,
        forward: RuleForward,
        method: str = "forward",
        *,
        for_speed: bool = False,
    ) -> None:
        self.name, self.slots, self.batch, self.method, self.for_speed = name, slots, batch, method, for_speed
        self._rule = forward
        self._own_forward: Callable[..., Any]
        self._caller: nn.Module | None = None
        self._is_intercepted = False
        self._calls = 0  # in the forward in flight
        self._known = KnownCalls()  # calls that the check has seen, in the mode of the forward in flight

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return (nothing, ())

    @property
    def size(self) -> int:
        """Samples of the batch in flight."""
        assert self.batch.size is not None
        return self.batch.size

    # -- the rule and what it replaces -------------------------------------------------------------------------------
    @property
    def rule(self) -> RuleForward:
        return self._rule

    @property
    def own_forward(self) -> Callable[..., Any]:
        """The module's method as it was before the rule took its place."""
        return self._own_forward

    def replace(self, own_forward: Callable[..., Any]) -> None:
        """This method runs through the rule from now on."""
        self._own_forward = own_forward

    def change_rule(self, forward: RuleForward) -> None:
        """The module turned out to need another rule."""
        self._rule = forward

    def add_slots(self, slots: dict[str, Slot]) -> None:
        """The module computes with these parameters of another one, too."""
        self.slots |= slots

    def caller(self, module: nn.Module) -> nn.Module:
        """The own forward as a module, which `functional_call` can give other parameter values ("module.weight")."""
        if self._caller is None:
            self._caller = _OwnForward(module, self._own_forward)
        return self._caller

    @property
    def is_intercepted(self) -> bool:
        """Whether calls of functions inside the own forward have gone through a rule."""
        return self._is_intercepted

    def note_interception(self) -> None:
        self._is_intercepted = True

    # -- calls in a forward of the model -----------------------------------------------------------------------------
    def begin(self, known: "KnownCalls") -> None:
        """A forward of the model begins."""
        self._calls, self._known = 0, known

    def restart(self) -> None:
        """A forward begins again: its calls are numbered from 0."""
        self._calls = 0

    @property
    def calls(self) -> int:
        """How many there were so far."""
        return self._calls

    def next_call(self) -> int:
        """The number of the call that begins."""
        number, self._calls = self._calls, self._calls + 1
        return number

    @contextmanager
    def borrow_known(self, known: "KnownCalls") -> Iterator[None]:
        """Know these calls for a while, and no others."""
        own, self._known = self._known, known
        try:
            yield
        finally:
            self._known = own

    def split(self, x: Tensor, axis: Axis) -> Tensor:
        """x with its samples first, for a rule."""
        x_B = axis.split(x, self.size)
        if torch._C._are_functorch_transforms_active():
            # Inside vmap, what does not depend on the sample would be one for all, and its gradient the sum of theirs.
            nothing = next(iter(self.slots.values())).carriers[0].detach().sum()
            x_B = x_B + nothing.to(x_B.dtype)
        return x_B

    def places(self, leaves: list[Any]) -> SamplePlaces:
        """Where the samples are in a call's inputs and outputs."""
        batch, again = self.batch, _in_backward()  # where a checkpoint runs layers again, in an order of its own
        if not batch.in_forward and not again:
            raise PrivacyError(
                f"layer '{self.name}' ran outside of the model's forward, where lsg cannot see what is done with its "
                "samples: call the model that make_private was given, and do what you do with its parts in its forward"
            )
        if batch.size == 1:
            if any(slot.carriers[0].shape[0] != 1 for slot in self.slots.values()):
                raise PrivacyError(
                    f"layer '{self.name}' is called by a module that runs sample by sample and does not contain it, so "
                    "its samples cannot be told apart: give it as an argument, or make it a part of that module"
                )
            return ONE_SAMPLE
        found = self._known.find(leaves, self.size, None if again else self.next_call())
        if found is None and again:
            raise PrivacyError(
                f"layer '{self.name}' runs again in a backward (activation checkpointing) in a way that lsg cannot "
                "follow: in a module that runs sample by sample, or called several times with samples in different "
                "places. Turn checkpointing off, or let it be of smaller parts"
            )
        if found is None:
            raise UnknownCall(self, leaves)
        return found


class _OwnForward(nn.Module):
    """Makes a method of a module callable with other parameter values. Hooks on the module, which have their turn
    outside, do not run."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)


class KnownCalls:
    """Sample places of a patched module's calls, by what the calls look like and by their number in a forward."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], dict[int, SamplePlaces]] = {}

    def add(self, look: tuple[Any, ...], number: int, places: SamplePlaces) -> None:
        self._known.setdefault(look, {})[number] = places

    def find(self, leaves: list[Any], size: int, number: int | None) -> SamplePlaces | None:
        """None if no such call was seen. number: None in a backward, where layers run again in another order."""
        alike = self._known.get(signature(leaves, size))
        if alike is None:
            return None
        if number is not None:
            return alike.get(number)
        first, *others = alike.values()
        return first if all(other == first for other in others) else None


def _in_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
