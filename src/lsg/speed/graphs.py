"""Recording a private model: its forward and backward are replayed as CUDA graphs, so that the CPU launches nothing.

The first batch of a shape runs as usual, where checks and lazy set-up happen; the second is recorded; from then on the
recording is replayed on the new inputs. Per-sample gradients are written into the same memory each time, which is safe
because they are summed up before the next forward; where they wait for that, or a backward is still to come, the
forward runs as usual. The same holds for the inputs and output gradients that dense weights leave in place of them.

A replay runs no Python, and reads the memory that was recorded. So a model is recorded only after it was seen to depend
on its inputs, parameters and buffers alone, and is watched from then on:

- a forward that changes what modules hold in Python, or that has hooks inside, is not recorded (`python_state.py`);
- numbers among the modules' attributes belong to the shape: with others there is another recording;
- a forward may read one more kind of tensor, a module's attribute, whose place in memory is looked at before each
  replay; a model that reads any other is not recorded (`outside_reads.py`);
- a comparison of values finds what all this does not see (a global number, Python's random numbers): the first replays
  of a recording, and others now and then, are compared with a plain run (`comparison.py`), whose result is used.

Dropout can be compared as well: both runs start from the same state of PyTorch's generator, and a replayed graph draws
from it what its kernels would draw when launched one by one. (At each replay PyTorch adds the generator's offset to the
offsets of the kernels, which count from zero.) Plain runs for a comparison are told that they are being recorded, so
that they take the same kernels.

A model that fails one of these tests runs as usual from then on.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lsg.parameters.slot import Recordable
from lsg.speed.comparison import is_due
from lsg.speed.python_state import changed_name, hooked, number_names, numbers, python_state
from lsg.speed.recording import Pass, Recording
from lsg.speed.tape import Tape
from lsg.speed.trial import CONSTANT

_MOST_SHAPES = 24  # recordings at most: each keeps memory for a micro-batch's per-sample gradients
_MOST_CHANGES = 3  # forwards of one shape that change something in Python; fewer may just fill a cache
_MOST_NUMBERS = 8  # sets of numbers among the modules' attributes: with more, the numbers are no settings
_MOST_DISCARDS = 3  # after so many, a shape is recorded again only when it was seen _OFTEN times
_OFTEN = 100


class _Shape:
    """What is known of forwards with inputs of one shape."""

    def __init__(self) -> None:
        self.seen = 0  # forwards that changed nothing in Python
        self.replays = 0
        self.recording: Recording | None = None


class GraphedForward:
    """Calls `forward` the first time that it sees a shape, then a recording of it."""

    def __init__(self, forward: Callable[..., Any], model: nn.Module, slots: Sequence[Recordable], tape: Tape) -> None:
        self._model, self._slots, self._tape = model, slots, tape
        device = slots[0].parameter.device

        def on_the_device(*args: Any, **kwargs: Any) -> Any:
            with device:  # positions made on the fly, say: a copy from the host would end the recording
                return forward(*args, **kwargs)

        self._forward = on_the_device
        self._shapes: dict[Any, _Shape] = {}
        self._changes: Counter[Any] = Counter()  # shape of inputs -> forwards that changed something in Python
        self._numbers_seen: list[tuple[Any, ...]] = []
        self._discards = 0
        self.recordable = True
        self.recorded = 0
        self._in_flight: weakref.ref[Pass] | None = None

    def discard_recordings(self) -> None:
        """Drops all recordings, because memory that they read has moved. They are made anew."""
        self._discards += any(shape.recording is not None for shape in self._shapes.values())
        self._shapes.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if not self.recordable or not all(map(_is_recordable, leaves)):
            return self._forward(*args, **kwargs)
        inputs = (structure, *map(_signature, leaves))
        surroundings = self._surroundings()
        shape = self._shape((inputs, surroundings)) if surroundings is not None else None
        if shape is None or self._occupied():
            return self._forward(*args, **kwargs)
        if shape.seen < (1 if self._discards <= _MOST_DISCARDS else _OFTEN):
            return self._run_watched(shape, inputs, args, kwargs)
        try:
            finding = self._prepare(shape, leaves, structure)
        except Exception as error:  # if it is the model's own error, the plain forward raises it
            finding = f"this model cannot be recorded ({str(_first_cause(error)).splitlines()[0]})"
        if finding is not None:
            self._give_up(finding)
            return self._forward(*args, **kwargs)
        if is_due(shape.replays):
            return self._watch_backward(self._forward(*args, **kwargs))
        assert shape.recording is not None
        out, this_pass = shape.recording.replay(leaves)
        self._in_flight = weakref.ref(this_pass)
        return out

    def _shape(self, key: Any) -> _Shape | None:
        if key not in self._shapes and len(self._shapes) < _MOST_SHAPES:
            self._shapes[key] = _Shape()
        return self._shapes.get(key)

    def _run_watched(self, shape: _Shape, inputs: Any, args: Any, kwargs: Any) -> Any:
        """Runs the forward as usual, and looks whether it changes what the modules hold in Python."""
        before = python_state(self._model)
        out = self._forward(*args, **kwargs)
        changed = changed_name(before, python_state(self._model))
        if changed is None:
            shape.seen += 1
        else:
            self._changes[inputs] += 1
        if self._changes[inputs] == _MOST_CHANGES:
            self._give_up(f"the model's forward changes '{changed}', which a recording would not do")
        return self._watch_backward(out)

    def _watch_backward(self, output: Any) -> Any:
        """Gives recordings up if a second backward goes through this plain forward: a recording could not do that."""
        passes: set[int] = set()

        def look(gradient: Tensor) -> None:
            passes.add(torch._C._current_graph_task_id())
            if len(passes) > 1:
                self._give_up("backward is called twice for one forward of this model, which a recording cannot do")

        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(look)
        return output

    def _prepare(self, shape: _Shape, leaves: list[Any], structure: Any) -> str | None:
        """Records if need be, and compares if it is due. Returns why nothing must be replayed, None if all is well."""
        if shape.recording is None:
            recording = Recording(self._forward, leaves, structure, self._slots, self._model)
            outside = recording.record(self._tape)
            if outside is not None:
                return outside
            shape.recording = recording
            self.recorded += 1
        shape.replays += 1
        moved = shape.recording.moved()
        if moved is not None:
            return f"'{moved}', which the model's forward reads, is another tensor than before: pass it as an input"
        difference = shape.recording.difference(leaves, self._tape) if is_due(shape.replays) else None
        if difference is None:
            return None
        return (
            f"a recording computes something else than the model ({difference}), whose forward reads what is not its "
            "input, or draws random numbers in Python"
        )

    def _give_up(self, finding: str) -> None:
        """Runs the model as usual from now on, and warns once, with the reason."""
        if self.recordable:
            self.recordable = False
            self._shapes.clear()
            warnings.warn(f"cuda_graphs: {finding}. The model runs without recordings from now on", stacklevel=2)

    def _surroundings(self) -> Any:
        """What a recording depends on beside its inputs; None if that rules recordings out.

        It is the precision, the modules' numbers and modes, the places of tensors, and whether they are trained.
        """
        modules = list(self._model.modules())
        with_hook = hooked(modules[1:])
        if with_hook is not None:
            name = next(name for name, module in self._model.named_modules() if module is with_hook)
            return self._give_up(f"'{name}' has a hook, which a recording would not call")
        now = numbers(modules)
        if now not in self._numbers_seen:
            self._numbers_seen.append(now)
        if len(self._numbers_seen) > _MOST_NUMBERS:
            pairs = zip(number_names(self._model), self._numbers_seen[-2], now, strict=False)
            changed = [name for name, before, after in pairs if before != after]
            return self._give_up(f"attributes of the model ({', '.join(changed[:3])}) get other values over and over")
        tensors = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        return cast, self._numbers_seen.index(now), tuple((t.data_ptr(), t.requires_grad) for t in tensors)

    def _occupied(self) -> bool:
        """Whether a recording's memory is still needed: its backward may come, or its gradients wait to be summed."""
        last = None if self._in_flight is None else self._in_flight()
        return (last is not None and not last.done) or any(slot.pending for slot in self._slots)


def _is_recordable(leaf: Any) -> bool:
    """Refuses objects, which may hold other tensors at the next call, and inputs that want a gradient."""
    return not leaf.requires_grad if isinstance(leaf, Tensor) else isinstance(leaf, CONSTANT)


def _first_cause(error: BaseException) -> BaseException:
    """The error inside a recording. Ending the recording then fails as well, with an error that says less."""
    return error if error.__context__ is None else _first_cause(error.__context__)


def _signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)  # True is not 1
