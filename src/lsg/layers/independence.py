"""The sample-independence check: run once, on the first batch of several samples, before anything is trained.

Clipping bounds one sample's influence only if its gradient is its own, and a rule that runs sample by sample must
compute what its layer does. So the model is looked at twice. As it was given, without rules, on a few samples: inputs
and outputs of every trained layer and outputs of the model that belong to some samples must have exactly zero gradient
with respect to the other samples' inputs. And with its rules, on the whole batch: the same with respect to the
carriers. For a weight that leaves the factors of its gradients (`calls.py`), the carriers of its outputs stand for its
own: they have a gradient wherever the weight has one.
"""

import copy
import dataclasses
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lsg.errors import PrivacyError
from lsg.layers.calls import Calls, untransformed
from lsg.layers.fallback import fallback_forward
from lsg.layers.intercept import intercepted_forward
from lsg.layers.probes import Probes
from lsg.layers.site import site_of
from lsg.layers.slot import Slot, calls_apart

_ADVICE = (
    "per-sample clipping would not bound one sample's influence. Look for statistics or shuffles over the batch, "
    "inputs that are not batch first, or a layer that mixes samples, and remove it. An input that samples share and "
    "that has as many rows as there are samples wants a leading dimension of 1"
)
_KEPT = (Tensor, int, float, type(None))  # of what a module keeps, what a forward may change
_one_at_a_time = threading.RLock()


class Check:
    """What is looked at: a model, how it runs (`forward`, its own), and its modules and slots that have rules."""

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], modules: Sequence[nn.Module], slots: Sequence[Slot]
    ) -> None:
        self._model, self._forward, self._modules, self._slots = model, forward, modules, slots
        self._devices = sorted({slot.parameter.device.index for slot in slots if slot.parameter.device.type == "cuda"})

    def __call__(self, size: int, inputs: tuple[Any, Any]) -> None:
        """Raise PrivacyError, naming the first place where samples have been mixed, if there is one."""
        culprit = self._without_rules(size, inputs)
        if culprit is None:
            culprit = self._with_rules(size, inputs)
        if culprit is not None:
            raise PrivacyError(f"samples of a batch influence each other {culprit}: {_ADVICE}")

    def _without_rules(self, size: int, inputs: tuple[Any, Any]) -> str | None:
        """None, too, for a model that cannot run like this: with inputs that need gradients, say."""
        culprit = None
        try:
            for rows in _few(size):
                culprit = self._of_samples(_Samples(self._model, size, rows), inputs)
                if culprit is None:  # what has as many rows as there are samples belongs to them if it always has
                    return None
            return culprit
        except Exception:
            pass
        try:  # it insists on its batch, or an input that samples share happens to have as many rows
            return self._of_samples(_Samples(self._model, size, size, first_alone=True), inputs)
        except Exception:
            return None

    def _of_samples(self, samples: "_Samples", inputs: tuple[Any, Any]) -> str | None:
        with _eagerly(), _plain(self._modules), samples:
            return self._culprit(Probes(samples.rows), samples.cut(inputs), lambda _: samples.leaves, outputs=True)

    def _with_rules(self, size: int, inputs: tuple[Any, Any]) -> str | None:
        def carriers(calls: list[Calls]) -> list[Tensor]:
            own = [carrier for slot in self._slots for carrier in slot.carriers]
            return own + [carrier for of_slot in calls for carrier in of_slot.made or ()]

        # A compiler cannot put probes into what it compiles. A few models cannot do without one (`torch.cond`).
        try:
            with _eagerly():
                return self._culprit(Probes(size), _copied(inputs), carriers)
        except PrivacyError:
            raise
        except Exception:
            pass
        # Only here, past the error, is what it held free.
        return self._culprit(Probes(size), _copied(inputs), carriers)

    def _culprit(
        self,
        probes: Probes,
        inputs: tuple[Any, Any],
        leaves: Callable[[list[Calls]], list[Tensor]],
        *,
        outputs: bool = False,
    ) -> str | None:
        """One forward with a probe at every layer's inputs (and outputs) and at the model's outputs, then backwards to
        the leaves that it leaves behind, which belong to samples row by row."""
        args, kwargs = inputs
        with _left_alone(self._model):  # which a backward may need as the forward left it
            try:
                with (
                    torch.random.fork_rng(devices=self._devices),
                    calls_apart(self._slots) as calls,
                    _watched(self._modules, probes, outputs=outputs),  # not in backwards: checkpoints run layers again
                ):
                    output = self._forward(*args, **kwargs)
                probes.add("before the model's output", output)
                return probes.culprit(leaves(calls))
            finally:
                probes.remove()


def _copied(inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    """A model may write to its inputs."""
    copied: tuple[Any, Any] = _mapped(torch.clone, inputs)
    return copied


def _mapped(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Each tensor changed, also in mappings and dataclasses that pytree does not know."""

    def inside(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, UserDict):  # transformers' BatchEncoding
            changed = copy.copy(value)
            changed.data = _mapped(change, value.data)
            return changed
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            return dataclasses.replace(value, **{name: _mapped(change, getattr(value, name)) for name in fields})
        return value

    return pytree.tree_map(inside, values)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """What the model keeps between batches (buffers, numbers and tensors of its modules) is put back at the end."""
    spaces = [space for module in model.modules() for space in (module._buffers, module.__dict__)]
    kept = [{name: value for name, value in space.items() if isinstance(value, _KEPT)} for space in spaces]
    tensors = [value for found in kept for value in found.values() if isinstance(value, Tensor)]
    values = {id(t): (t._version, t.detach().clone()) for t in tensors if not t.is_inference()}
    try:
        yield
    finally:
        for space, found in zip(spaces, kept, strict=True):
            for name in [name for name, value in space.items() if isinstance(value, Tensor) and name not in found]:
                del space[name]
            space.update({name: _as_before(value, values) for name, value in found.items() if name in space})


def _as_before(value: Any, values: dict[int, tuple[int, Tensor]]) -> Any:
    if id(value) not in values or value._version == values[id(value)][0]:
        return value
    before = values[id(value)][1]
    try:
        return value.detach_().copy_(before)
    except RuntimeError:  # a view cannot be detached in place
        return before


def _few(size: int) -> list[int]:
    """Two numbers of samples to look at: what is a multiple of both has a row a sample. Of two samples a batch norm
    would make plus and minus one, whatever they are."""
    return [rows for rows in dict.fromkeys((7, 5, size - 1, size - 2)) if 2 <= rows < size][:2] or [size]


@contextmanager
def _eagerly() -> Iterator[None]:
    """Without compilers, and without reentrant checkpoints: they hide what is inside from autograd."""
    at_once = mock.patch.object(torch.utils.checkpoint.CheckpointFunction, "apply", _run_at_once)
    with _one_at_a_time, torch.compiler.set_stance("force_eager"), at_once:  # which hold for all threads
        yield


def _run_at_once(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """In place of a checkpoint."""
    return function(*args)


@contextmanager
def _plain(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules run as they were given, without their rules."""
    sites = [site for site in map(site_of, modules) if site is not None]
    for site in sites:
        site.bypass = True
    try:
        yield
    finally:
        for site in sites:
            site.bypass = False


@contextmanager
def _watched(modules: Sequence[nn.Module], probes: Probes, *, outputs: bool) -> Iterator[None]:
    with ExitStack() as hooks:
        for module in modules:
            site = site_of(module)
            assert site is not None
            hooks.enter_context(
                module.register_forward_pre_hook(_before(f"before layer '{site.name}'", probes), with_kwargs=True)
            )
            if outputs:
                name = f"in layer '{site.name}' ({type(module).__name__})"
                hooks.enter_context(module.register_forward_hook(_after(name, probes)))
            elif site.rule in (fallback_forward, intercepted_forward):
                hooks.enter_context(
                    module.register_forward_hook(_refuse_another_function, prepend=True, with_kwargs=True)
                )
        yield


def _before(name: str, probes: Probes) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        probes.add(name, (args, kwargs))

    return hook


def _after(name: str, probes: Probes) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        probes.add(name, output)

    return hook


def _refuse_another_function(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Sample by sample a module must compute what it computes for the batch."""
    site = site_of(module)
    if site is None or site.rule is not fallback_forward or not untransformed():
        return
    with torch.no_grad():
        once, again = (pytree.tree_leaves(site.plain(*args, **kwargs)) for _ in range(2))
    random = not all(_close(a, b) for a, b in zip(once, again, strict=True))  # then only shapes can be compared
    alike = _same_shape if random else _close
    if not all(alike(a, b) for a, b in zip(once, pytree.tree_leaves(output), strict=True)):
        raise PrivacyError(
            f"layer '{site.name}' ({type(module).__name__}) computes something else for the samples of a batch than "
            "for each of them alone: it mixes samples, or an input that they share has as many rows as there are "
            "samples (then give it a leading dimension of 1)"
        )


def _same_shape(a: Any, b: Any) -> bool:
    return not isinstance(a, Tensor) or (isinstance(b, Tensor) and a.shape == b.shape)


def _close(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point()):
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    scale = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


class _Samples:
    """A model's inputs for its first few samples, as leaves: real numbers themselves, indices where they are looked up
    in a table."""

    def __init__(self, model: nn.Module, size: int, rows: int, *, first_alone: bool = False) -> None:
        """first_alone: of the inputs only the first is known to belong to samples."""
        self._size, self.rows, self._first_alone = size, rows, first_alone
        self._tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self._hooks = ExitStack()
        self._indices: set[tuple[Any, ...]] = set()
        self.leaves: list[Tensor] = []

    def __enter__(self) -> "_Samples":
        for table in self._tables:
            self._hooks.enter_context(table.register_forward_hook(self._look_up))
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def cut(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        cut: tuple[Any, Any] = _mapped(self._cut, inputs)
        return cut

    def _cut(self, value: Tensor) -> Tensor:
        known = self.leaves or self._indices
        if value.dim() == 0 or value.shape[0] != self._size or (self._first_alone and known):
            return value.clone()
        few = value[: self.rows].clone()
        if few.is_floating_point():
            return self._leaf(few)
        self._indices.add(_identity(few))
        return few

    def _look_up(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if args and isinstance(args[0], Tensor) and _identity(args[0]) in self._indices:
            return self._leaf(output)
        return None

    def _leaf(self, value: Tensor) -> Tensor:
        self.leaves.append(value.detach().requires_grad_())
        return self.leaves[-1].clone()


def _identity(value: Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), *value.shape
