"""The sample-independence check: run once, on the first batch of several samples, before anything is trained.

Clipping bounds one sample's influence only if its gradient is its own, and a rule that runs sample by sample must
compute what its layer does. So the model is looked at twice. As it was given, without rules, on a few samples: inputs
and outputs of every trained layer and outputs of the model that belong to some samples must have exactly zero gradient
with respect to the other samples' inputs. And with its rules, on the whole batch: the same with respect to the
carriers. For a weight that leaves the factors of its gradients (`calls.py`), the carriers of its outputs stand for its
own: they have a gradient wherever the weight has one.
"""

import threading
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
from lsg.layers.probes import Probes
from lsg.layers.site import site_of
from lsg.layers.slot import Slot, calls_apart

_FEW = 4  # of two samples a batch norm makes plus and minus one, whatever they are
_ADVICE = (
    "per-sample clipping would not bound one sample's influence. Look for statistics or shuffles over the batch, "
    "inputs that are not batch first, or a layer that mixes samples, and remove it"
)
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
        for rows in dict.fromkeys((min(size, _FEW), size)):  # a model may insist on the batch that it got
            try:
                with _eagerly(), _plain(self._modules), _Samples(self._model, size, rows) as samples:
                    return self._culprit(Probes(rows), samples.cut(inputs), lambda _: samples.leaves, outputs=True)
            except PrivacyError:
                raise
            except Exception:
                continue
        return None

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
    copied: tuple[Any, Any] = pytree.tree_map_only(Tensor, torch.clone, inputs)
    return copied


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
            elif site.rule is fallback_forward:
                hooks.enter_context(module.register_forward_hook(_refuse_another_function, with_kwargs=True))
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
    if site is None or not untransformed():
        return
    with torch.no_grad():
        once, again = (pytree.tree_leaves(site.plain(*args, **kwargs)) for _ in range(2))
    if not all(_close(a, b) for a, b in zip(once, again, strict=True)):
        return  # random: there is nothing to compare
    if not all(_close(a, b) for a, b in zip(once, pytree.tree_leaves(output), strict=True)):
        raise PrivacyError(
            f"layer '{site.name}' ({type(module).__name__}) computes something else for the samples of a batch than "
            "for each of them alone: it mixes samples, or an input that they share has as many rows as there are "
            "samples (then give it a leading dimension of 1)"
        )


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

    def __init__(self, model: nn.Module, size: int, rows: int) -> None:
        self._size, self._rows = size, rows
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
        cut: tuple[Any, Any] = pytree.tree_map_only(Tensor, self._cut, inputs)
        return cut

    def _cut(self, value: Tensor) -> Tensor:
        if value.dim() == 0 or value.shape[0] != self._size:
            return value
        few = value[: self._rows].clone()
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
