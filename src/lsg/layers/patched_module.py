"""Patched modules: a module whose forward goes through a rule, and how that is put on and taken off again.

The module stays the same object of the same class: only its instance gets a `forward`, a bound method, and a `_lsg`
attribute. On a copy or a pickle of the module both are inert: it behaves as the plain module.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lsg.errors import PrivacyError
from lsg.layers.samples import ONE_SAMPLE, Axis, SamplePlaces, leaves_of, signature
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
        self.in_forward = False  # whether the model's own forward is running
        self.last_cast = LastCast()
        # Whether norms may lay out their output channels last: None before the model was seen to bear it.
        self.channels_last_norms: bool | None = None
        self.watch: Watch | None = None  # while the check runs the model without its rules
        self.witness: Witness | None = None  # while it compares what rules return

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
    """What a module's rule needs: its name, its slots by local name, its plain forward and the batch in flight.

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
        self.name, self.slots, self.batch, self.rule, self.method = name, slots, batch, forward, method
        self.for_speed = for_speed
        self.plain: Callable[..., Any]
        self.caller: nn.Module | None = None  # runs `plain` with other parameter values, where the rule needs that
        self.intercepted = False  # whether calls of functions inside the plain forward have gone through a rule
        self.calls = 0  # in the forward in flight
        self.known = KnownCalls()  # calls that the check has seen, in the mode of the forward in flight

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return (nothing, ())

    @property
    def size(self) -> int:
        """Samples of the batch in flight."""
        assert self.batch.size is not None
        return self.batch.size

    def begin(self, known: "KnownCalls") -> None:
        """A forward of the model begins."""
        self.calls, self.known = 0, known

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
        batch = self.batch
        if not batch.in_forward and not _in_backward():  # in a backward a checkpoint runs layers again
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
        number = self.calls
        if batch.in_forward:
            self.calls += 1
        found = self.known.find(leaves, self.size, number if batch.in_forward else None)
        if found is None and not batch.in_forward:
            raise PrivacyError(
                f"layer '{self.name}' runs again in a backward (activation checkpointing) in a way that lsg cannot "
                "follow: in a module that runs sample by sample, or called several times with samples in different "
                "places. Turn checkpointing off, or let it be of smaller parts"
            )
        if found is None:
            raise UnknownCall(self, leaves)
        return found


class KnownCalls:
    """KnownCalls of a patched module's calls, by what the calls look like and by their number in a forward."""

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


def patch_of(module: nn.Module) -> "PatchedModule | None":
    """The patched module that a module has, if any."""
    patched = module.__dict__.get("_lsg")
    assert patched is None or isinstance(patched, PatchedModule)
    return patched


def fixed_signature(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keep an autograd function's signature at hand: PyTorch asks for it at each call, at a layer's cost."""
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


def refuse_double_backward() -> None:
    """Rules give first derivatives only; in a backward pass gradients are on only where a second one is asked for."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise PrivacyError("backward(create_graph=True): per-sample rules have no second derivatives")


def nothing() -> None:
    """What a pickle of a patched module is loaded as."""


def _through_rule(method: str) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        patched: PatchedModule | None = self.__dict__["_lsg"]
        if patched is None:  # a copy of a private model is a plain model
            return getattr(type(self), method)(self, *args, **kwargs)
        batch = patched.batch
        if patched.for_speed:
            return patched.rule(self, patched, *args, **kwargs)
        if batch.watch is not None:
            return batch.watch(self, patched, args, kwargs)
        if not torch.is_grad_enabled():
            return patched.plain(*args, **kwargs)
        number, places = patched.calls, patched.places(leaves_of(args, kwargs))
        out = patched.rule(self, patched, places, *args, **kwargs)
        if batch.witness is not None:
            batch.witness(patched, number, out)
        return out

    forward.__name__ = method  # a pickled bound method is looked up by name: the plain one is found
    return forward


_METHODS = ("forward", "compute_bias", "compute_position_bias", "get_prompt")
_PATCHES: dict[str, Callable[..., Any]] = {method: _through_rule(method) for method in _METHODS}


def is_private(model: nn.Module) -> bool:
    """Whether an engine trains the model or a part of it."""
    patched_modules = (patch_of(module) for module in model.modules())
    return any(patched is not None and patched.slots for patched in patched_modules)


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody else has put a forward on this instance. A copy of a private module carries an inert one."""
    own = module.__dict__.get("forward")
    return own is not None and not _is_inert(module, own) and _code(own) not in _OWNERS


# Code of every method that lsg puts on an instance -> the attribute that holds its owner, None on copies.
_OWNERS: dict[Any, str] = {patch.__code__: "_lsg" for patch in _PATCHES.values()}


def register_patch(patch: Callable[..., Any], owner: str) -> None:
    _OWNERS[patch.__code__] = owner


def _code(method: Any) -> Any:
    """Of a bound method, under whatever signature."""
    return getattr(getattr(method, "__func__", None), "__code__", None)


def _is_inert(module: nn.Module, method: Any) -> bool:
    """Whether a method came with a copy of a private module."""
    owner = _OWNERS.get(_code(method))
    return owner is not None and module.__dict__.get(owner) is None


def install(module: nn.Module, patched: PatchedModule) -> None:
    """In place of one that is there for speed alone, if there is one."""
    before = patch_of(module)
    if before is not None:
        uninstall(module, before)
    patched.plain = swap_in(module, patched.method, _PATCHES[patched.method])
    module.__dict__["_lsg"] = patched


def patched_method(module: nn.Module, patched: PatchedModule) -> Callable[..., Any]:
    """A method of the module that goes through its rule, for whoever calls it in place of the module's own."""
    module.__dict__["_lsg"] = patched
    return types.MethodType(_PATCHES[patched.method], module)


def uninstall(module: nn.Module, patched: PatchedModule) -> None:
    """Nothing where another patched module has taken its place."""
    if patch_of(module) is patched:
        del module.__dict__["_lsg"]
        swap_out(module, patched.method, patched.plain)


def swap_in(module: nn.Module, method: str, patch: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method on this instance alone. Returns what it had, without the inert patch that a copy carries."""
    if _is_inert(module, module.__dict__.get(method)):
        del module.__dict__[method]
    plain: Callable[..., Any] = getattr(module, method)
    setattr(module, method, types.MethodType(patch, module))
    return plain


def swap_out(module: nn.Module, method: str, plain: Callable[..., Any]) -> None:
    """Undo `swap_in`."""
    delattr(module, method)
    if getattr(plain, "__func__", None) is not getattr(type(module), method):
        setattr(module, method, plain)  # the instance had a method of its own before
