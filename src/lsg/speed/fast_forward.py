"""A private model's fast forward: compiled, or recorded as CUDA graphs, or both, at sizes rounded up to a few.

Only the forward proper is replaced. What decides on batches and subspaces runs before it, in hooks, so that a compiled
graph has no breaks and takes carriers and subspaces as inputs.
"""

import inspect
import itertools
import time
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lsg.errors import LsgError, first_line, is_out_of_memory
from lsg.layers.instance_methods import nothing, register_patch, swap_in, swap_out
from lsg.parameters.slot import Recordable
from lsg.speed.device_constants import without_host_constants
from lsg.speed.graphs import GraphedForward
from lsg.speed.tape import Tape
from lsg.speed.transformers_masks import without_needless_masks


class FastForward:
    """Replaces a model's forward by a faster one while gradients are on. Inert on copies, gone after `remove`."""

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[Recordable],
        *,
        compiled: bool,
        tape: Tape | None,
        before_run: Callable[[], None] = lambda: None,
    ) -> None:
        """before_run: to be called before each run of the model's own forward; recordings have several at a time."""
        self.seconds = 0.0  # spent in calls that compiled or recorded something
        self._model, self._slots, self._tape, self._before_run = model, slots, tape, before_run
        self.own_forward = swap_in(model, "forward", signed(model.forward, _forward))
        self._graphed: GraphedForward | None = None
        self._chosen = False  # whether lsg, not the user, chose to compile
        self._run = self._way(compiled=compiled)
        model.__dict__["_lsg_fast"] = self

    def _way(self, *, compiled: bool) -> Callable[..., Any]:
        """Returns a function that runs the model in this way. It has no recordings yet."""
        run: Callable[..., Any] = _compiled(self.own_forward) if compiled else self.own_forward
        if self._tape is not None and not compiled:  # compiled code makes its constants on the device by itself
            run = without_host_constants(run)
        run = _after(self._before_run, run)
        self._graphed = None if self._tape is None else GraphedForward(run, self._model, self._slots, self._tape)
        return self._graphed or run

    @property
    def records(self) -> bool:
        """Whether the model is recorded, or will be."""
        return self._graphed is not None and self._graphed.recordable

    def choose_compiled(self) -> None:
        """Compiles from the next forward on. A model that cannot be compiled goes on as before."""
        self._chosen, self._run = True, self._way(compiled=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return (nothing, ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a compiler of the user runs the model
            return self.own_forward(*args, **kwargs)
        made, start = self._made(), time.perf_counter()
        try:
            out = self._run(*args, **kwargs)
        except Exception as error:
            if not self._chosen or isinstance(error, LsgError) or is_out_of_memory(error):
                raise
            self._chosen, self._run = False, self._way(compiled=False)
            warnings.warn(
                f"compile: this model cannot be compiled, and goes on without ({first_line(error)})", stacklevel=2
            )
            out = self._run(*args, **kwargs)
        if self._made() != made:
            self.seconds += time.perf_counter() - start
        return out

    def _made(self) -> tuple[int, int]:
        """How many graphs were compiled and how many recorded so far."""
        from torch._dynamo.utils import counters  # the compiler takes a second to load, which `import lsg` need not

        compiled = counters["stats"]["unique_graphs"]
        return compiled, 0 if self._graphed is None else self._graphed.recorded

    def discard_recordings(self) -> None:
        """Subspaces have moved in memory: recordings, which know their old place, are made anew."""
        if self._graphed is not None:
            self._graphed.discard_recordings()

    def remove(self) -> None:
        self.discard_recordings()  # frees their memory for the next run
        swap_out(self._model, "forward", self.own_forward)
        del self._model.__dict__["_lsg_fast"]


def _after(before_run: Callable[[], None], forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        before_run()
        return forward(*args, **kwargs)

    return run


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    fast = self.__dict__["_lsg_fast"]
    if fast is None:
        return type(self).forward(self, *args, **kwargs)
    return fast(*args, **kwargs)


_forward.__name__ = "forward"
register_patch(_forward, "_lsg_fast")


def signed(forward: Callable[..., Any], by: types.FunctionType | Any) -> Callable[..., Any]:
    """What replaces a model's forward, with its signature: transformers' `generate` looks there for what it takes."""
    patch = types.FunctionType(by.__code__, by.__globals__, "forward")
    try:
        own = inspect.signature(forward)
    except (TypeError, ValueError):  # it has none
        return patch
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    patch.__signature__ = own.replace(parameters=[this, *own.parameters.values()])  # type: ignore[attr-defined]
    return patch


_numbers = itertools.count()


# Rules count their calls. In a checkpointed layer the backward runs the compiled graph again, without the counting: the
# calls were counted in the forward.
_COUNTING = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    import torch._dynamo as compiler

    compiled = torch.compile(_of_its_own(forward))
    in_checkpoints = {_COUNTING: True} if hasattr(compiler.config, _COUNTING) else {}

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_needless_masks(), compiler.config.patch(in_checkpoints):
            return compiled(*args, **kwargs)

    return run


def _of_its_own(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with code of its own: PyTorch compiles a piece of code a few times only, whoever shares it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=f"forward_{next(_numbers)}")
    return run


def pad_rows(inputs: Any, size: int, padded: int) -> Any:
    """Every tensor of `size` rows among a model's inputs, with its first row repeated up to `padded` rows."""

    def pad(t: Tensor) -> Tensor:
        if t.dim() == 0 or t.shape[0] != size:
            return t
        return torch.cat([t, t[:1].expand(padded - size, *t.shape[1:])])

    return pytree.tree_map_only(Tensor, pad, inputs)


class NoRows(Exception):  # noqa: N818  (whoever pads runs the model again without)
    """Raised where a model returns a trained tensor that has no row for each sample, such as its loss."""


def cut_rows(output: Any, size: int, padded: int) -> Any:
    """The model's output without the rows that padding added: they get no gradient. Raises NoRows."""

    def cut(t: Tensor) -> Tensor:
        if t.dim() > 0 and t.shape[0] == padded:
            return t[:size]
        if t.requires_grad:
            raise NoRows
        return t

    if isinstance(output, dict):  # transformers' outputs are dicts of a class of their own
        return type(output)(**{key: cut_rows(value, size, padded) for key, value in output.items()})
    return pytree.tree_map_only(Tensor, cut, output)
