"""The model's own forward while it is private: where every forward begins, whoever calls it and how.

It is replaced on the instance, so that `model(x)` and `model.forward(x)` take the same way. Inert on copies.
"""

import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from lsg.check.kept_state import snapshot
from lsg.errors import PrivacyError
from lsg.layers.install import patched_method
from lsg.layers.instance_methods import nothing, register_patch, swap_in, swap_out
from lsg.layers.patched_module import Batch, PatchedModule, UnknownCall
from lsg.speed.fast_forward import NoRows, cut_rows, signed


class ForwardEvents(Protocol):
    """What has to be done around a forward."""

    batch: Batch

    @property
    def keeps_state(self) -> bool:
        """Whether the model keeps anything from batch to batch."""

    def begin(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """Returns the inputs as the model gets them."""

    def end(self, output: Any) -> None:
        """What the model returned, padding included."""

    def check(self, inputs: tuple[Any, Any]) -> None:
        """Look at the model with these inputs, of which something is new."""

    def stop_padding(self) -> None:
        """Gives the model its batches without padding from now on."""


class RootForward:
    """Replaces a model's forward until `remove`."""

    def __init__(self, model: nn.Module, events: ForwardEvents) -> None:
        self._model, self._events = model, events
        # Here rather than where they are defined: PyTorch's compiler takes a second to load.
        self._begin, self._end, self._mark = map(torch.compiler.disable, (_begin, _end, _mark))
        self.replaced: Callable[..., Any] = swap_in(model, "forward", signed(model.forward, _forward))
        model.__dict__["_lsg_root"] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return (nothing, ())

    def put_under(self, patched: PatchedModule) -> None:
        """Let the model itself run through a patched module's rule, inside of what this does."""
        patched.replace(self.replaced)
        self.replaced = patched_method(self._model, patched)

    def remove(self) -> None:
        swap_out(self._model, "forward", self.replaced)
        del self._model.__dict__["_lsg_root"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        events = self._events
        if not torch.is_grad_enabled() or events.batch.in_forward or events.batch.watch is not None:
            return self.replaced(*args, **kwargs)
        inputs = self._begin(events, args, kwargs)
        batch = events.batch
        if batch.size is None or batch.records is None or batch.size == batch.records:
            output = self._run(events, inputs)
            self._end(events, output)
            return output
        restore = self._mark(self._model, events)
        output = self._run(events, inputs)
        self._end(events, output)
        try:
            return cut_rows(output, batch.records, batch.size)
        except NoRows:  # the model returns its loss, for example: it runs again without padding
            restore()
            events.stop_padding()
        return self(*args, **kwargs)

    def _run(self, events: ForwardEvents, inputs: tuple[Any, Any], *, again: bool = False) -> Any:
        restore = self._mark(self._model, events)
        events.batch.in_forward = True
        try:
            return self.replaced(*inputs[0], **inputs[1])
        except UnknownCall as call:
            unknown = call
        finally:
            events.batch.in_forward = False
        if again:
            raise PrivacyError(
                f"{unknown} is called in a way that the check on a few records of the batch does not see, so lsg "
                "cannot know where its samples are: let the model do with many records what it does with few"
            )
        restore()
        events.check(inputs)
        return self._run(events, self._begin(events, *inputs), again=True)


def _begin(events: ForwardEvents, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return events.begin((args, kwargs))


def _end(events: ForwardEvents, output: Any) -> None:
    events.end(output)


def _mark(model: nn.Module, events: ForwardEvents) -> Callable[[], None]:
    """Returns a function that restores the random states of this moment, and the model's own state if that is kept."""
    numbers = torch.get_rng_state()
    cuda = {p.device: torch.cuda.get_rng_state(p.device) for p in islice(model.parameters(), 1) if p.is_cuda}
    put_back = snapshot(model) if events.keeps_state else None

    def restore() -> None:
        torch.set_rng_state(numbers)
        for device, state in cuda.items():
            torch.cuda.set_rng_state(state, device)
        if put_back is not None:
            put_back()

    return restore


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    root = self.__dict__["_lsg_root"]
    if root is None:
        return type(self).forward(self, *args, **kwargs)
    return root(*args, **kwargs)


_forward.__name__ = "forward"
register_patch(_forward, "_lsg_root")


class CallWhileAlive:
    """A method of an object that may be gone by now. A copy of it does nothing."""

    def __init__(self, method: Callable[[], None] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CallWhileAlive":
        return CallWhileAlive(None)

    def __reduce__(self) -> Any:
        return (CallWhileAlive, (None,))
