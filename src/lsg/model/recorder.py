"""A model in, per-sample gradients out: puts rules on the model's modules and carriers into their slots."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from lsg.check.agreement import VIEW_REFUSED
from lsg.check.escapes import used_outside
from lsg.check.independence import Check
from lsg.check.kept_state import tensors_in
from lsg.check.look import Expected, NeedsRule
from lsg.check.records import mapped
from lsg.errors import ConfigurationError, PrivacyError
from lsg.layers.fallback import fallback_forward
from lsg.layers.patched_module import (
    Batch,
    KnownCalls,
    PatchedModule,
    install,
    patch_of,
    register_patch,
    swap_in,
    swap_out,
    uninstall,
)
from lsg.layers.plan import Plan
from lsg.layers.registry import faster_frozen
from lsg.layers.samples import signature
from lsg.losses import Reduction
from lsg.methods import Method
from lsg.model.root import Reaching, RootForward
from lsg.parameters.outer import OuterProducts
from lsg.parameters.refresh import Refresh
from lsg.parameters.slot import Slot, recast
from lsg.parameters.stack import make_stacks
from lsg.perf import PerfConfig, padded_size
from lsg.speed.fast_forward import FastForward, pad_rows
from lsg.speed.graphs import CudaTape

_NOTHING_KNOWN = KnownCalls()


class Recorder:
    """Owns the slots of a model and the rules on its modules, from `attach` to `detach`."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        method: Method,
        generator: torch.Generator,
        perf: PerfConfig,
        largest_batch: int | None = None,
        untrained: Mapping[str, nn.Parameter] | None = None,
        loss_reduction: Reduction = "mean",
    ) -> None:
        """untrained: parameters that the optimizer has and that are frozen; they have to stay so."""
        self.model, self.method, self.generator = model, method, generator
        self._loss_reduction = loss_reduction
        device = generator.device.type
        self._pads, self._largest_batch = perf.fast(device) and perf.pad, largest_batch
        self.slots: dict[str, Slot] = {
            t.name: Slot(t.name, t.parameter, t.layout, narrow=t.narrow, maskable=t.maskable, scale=t.scale)
            for t in plan.treatments
            if t.kind != "frozen"
        }
        self.stacks = make_stacks(self.slots.values())
        self._dense = [slot for slot in self.slots.values() if slot.layout is None]
        # The slots as they follow each other in a sum: stack by stack, then the dense ones.
        self.in_order = [slot for stack in self.stacks for slot in stack.slots] + self._dense
        # Where each of them stands among the model's trained parameters.
        self.positions = [list(self.slots).index(slot.name) for slot in self.in_order]
        self._untrained = untrained or {}
        self.batch = Batch()
        self.left_over = False  # whether an earlier micro-batch left gradients that nobody collected or dropped
        self.step = 0  # the logical step that the subspaces are for
        self.holding = False  # True while a logical batch is under way: its subspaces must not change
        self._seen_weights: tuple[int, ...] | None = None
        self._before_refresh = generator.get_state()
        # Calls of layers that the check has seen, for each kind of forward (`_kind`); finished, where it saw enough.
        self._known: dict[Any, dict[PatchedModule, KnownCalls]] = {}
        self._finished: set[Any] = set()
        self.keeps_state = False
        self._expected: Expected | None = None  # of the forward in flight, if it was just looked at
        self._patched_modules: list[tuple[nn.Module, PatchedModule]] = []
        for use in plan.uses:
            slots: dict[str, Slot] = {}
            for local, name in use.parameters.items():
                parts = plan.splits.get(name, [name])
                keys = [local] if parts == [name] else [f"{local}[{i}]" for i in range(len(parts))]
                slots |= {key: self.slots[part] for key, part in zip(keys, parts, strict=True)}
            self._patched_modules.append(
                (use.module, PatchedModule(use.name, slots, self.batch, use.rule.forward, use.rule.method))
            )
            install(*self._patched_modules[-1])
        self._trained = list(self._patched_modules)
        if device == "cuda":
            self._patched_modules += _install_faster(model, self.batch)
        graphs = perf.graphs(device)
        self.fast: FastForward | None = None
        if perf.fast(device) and not patch_of(
            model
        ):  # one that is a patched module itself is a single layer: too small to matter
            tape = CudaTape() if graphs else None
            recorded = list(self.slots.values())
            self.fast = FastForward(model, recorded, compiled=perf.compiles, tape=tape, before_run=self._restart)
        self._refresh = Refresh(self.stacks, list(self.slots.values()), method, generator, cuda_graph=graphs)
        self._root = RootForward(model, self)
        self._plain_zero_grad = swap_in(model, "zero_grad", _zero_grad)
        model.__dict__["_lsg_forget"] = Reaching(self.clear)
        self._handles = [
            *(s.parameter.register_post_accumulate_grad_hook(_refuse_escape(s)) for s in self.slots.values()),
            *(m.register_forward_pre_hook(_refuse_packed) for m in model.modules() if hasattr(m, "new_to_old")),
        ]

    def detach(self) -> None:
        """Leave the model as it was found."""
        for handle in self._handles:
            handle.remove()
        self._root.remove()
        if self.fast is not None:
            self.fast.remove()
        swap_out(self.model, "zero_grad", self._plain_zero_grad)
        del self.model.__dict__["_lsg_forget"]
        for module, patched in self._patched_modules:
            uninstall(module, patched)

    def prepare(self, size: int) -> None:
        """Subspaces for this logical step and carriers for a micro-batch of `size` samples."""
        if size != self.batch.records and self.pending:
            raise PrivacyError(
                f"a batch of {size} samples came while gradients of {self.batch.records} samples wait: "
                "call optimizer.step() after each loss.backward()"
            )
        if size == 0:
            raise PrivacyError(
                "a batch without samples has no gradients: leave its forward and backward out, and call "
                "optimizer.step() alone for its noisy step (lsg's loader does so by itself)"
            )
        for slot in self.slots.values():
            if not slot.parameter.requires_grad:
                raise ConfigurationError(
                    f"parameter '{slot.name}' was frozen after make_private: freeze parameters before, or detach first"
                )
        for name, parameter in self._untrained.items():
            if parameter.requires_grad:
                raise ConfigurationError(
                    f"parameter '{name}' was unfrozen after make_private, which gave it no rule: unfreeze parameters "
                    "before, or detach first and call make_private again"
                )
        armed = padded_size(size, self._largest_batch) if self._pads else size
        refreshed = self._refresh_if_stale()
        self.batch.records = size
        if refreshed or armed != self.batch.size:
            self.batch.size = armed
            for slot in self.slots.values():
                slot.arm(armed)

    def _refresh_if_stale(self) -> bool:
        """Whether slots got new subspaces (as records; a replayed graph writes new values into the old ones)."""
        weights = self._weights()
        if self.holding or self.pending or weights == self._seen_weights:
            return False
        before = self.generator.get_state()
        try:
            moved = self._refresh(self.step)
            recast(self.slots.values())
        except BaseException:  # out of memory, say: whoever tries again gets the same subspaces, and all of them
            self.generator.set_state(before)
            raise
        self._seen_weights, self._before_refresh = weights, before
        if moved and self.fast is not None:
            self.fast.forget()
        return moved

    def _weights(self) -> tuple[int, ...]:
        """Changes with the logical step and with every change of a weight."""
        return (self.step, *(slot.parameter._version for slot in self.slots.values()))

    def state_dict(self) -> dict[str, Any]:
        """The logical step, and the random state that its subspaces are, or will be, made from."""
        made = self.holding or self._seen_weights == self._weights()
        return {"step": self.step, "generator": self._before_refresh if made else self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: subspaces are made anew, from the same weights and random state, when they are needed."""
        self.step, self._seen_weights, self.holding = state["step"], None, False
        self.generator.set_state(state["generator"])

    def ready(self) -> dict[str, Slot]:
        """The slots, with the subspaces of the current step."""
        if self._refresh_if_stale():
            self.batch.size = None  # carriers are made anew at the next forward
        return self.slots

    def begin(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """A forward of the model begins: carriers for its samples, and the check if there was none of its kind."""
        size = batch_size(inputs)
        if size is None and self.batch.size is None:
            raise PrivacyError(
                "the model's inputs hold no tensor with a row for each record, so samples cannot be told apart: give "
                "it tensors, in tuples, lists, dictionaries or dataclasses"
            )
        if size is not None:
            self._refuse_results(inputs)
            self.prepare(size)
            assert self.batch.size is not None
            if self.batch.size > size:
                inputs = pad_rows(inputs, size, self.batch.size)
        kind = self._kind(inputs)
        if kind not in self._finished and self.batch.size is not None and not self._is_single(kind):
            self.check(inputs, kind)
        known = self._known.get(kind, {})
        for _, patched in self._trained:
            patched.begin(known.get(patched, _NOTHING_KNOWN))  # one that was added since is unknown
        return inputs

    def end(self, output: Any) -> None:
        """The forward is over."""
        expected, self._expected = self._expected, None
        if expected is not None and self.batch.size is not None:
            expected.refuse_others(list(tensors_in(output, set())), self.batch.size)

    def _is_single(self, kind: Any) -> bool:
        """Whether a batch is of one sample, and the model was looked at with several in the same mode."""
        return self.batch.size == 1 and any(modes == kind[0] for modes, _ in self._finished)

    def _restart(self) -> None:
        """Calls of layers are numbered from the beginning of each run."""
        for _, patched in self._trained:
            patched.calls = 0

    def check(self, inputs: tuple[Any, Any], kind: Any = None) -> None:
        """Samples stay apart, and the model computes the same with its rules as without; raises where it does not."""
        kind = self._kind(inputs) if kind is None else kind
        if self.batch.channels_last_norms is None:
            self.batch.channels_last_norms = True
        finished, rules, why = None, None, ""
        while finished is None or rules != [
            patched.rule for _, patched in self._trained
        ]:  # a subclass may change its rule
            rules = [patched.rule for _, patched in self._trained]
            known = self._known.setdefault(kind, {})
            for _, patched in self._trained:
                known.setdefault(patched, KnownCalls())
            try:
                finished = self._look(inputs, known)
            except NeedsRule as needed:
                why = why or str(needed)
                for place, parameter in needed.wanted:
                    if not self._run_apart(
                        self._around(place) if isinstance(place, PatchedModule) else place, parameter
                    ):
                        raise PrivacyError(why) from None
            except PrivacyError as error:
                raise PrivacyError(why or str(error)) from error
            except RuntimeError as error:
                if not self.batch.channels_last_norms or VIEW_REFUSED not in str(error):
                    raise
                self.batch.channels_last_norms = False  # the model takes a norm's output as PyTorch lays it out
        if finished:
            self._finished.add(kind)

    def _look(self, inputs: tuple[Any, Any], known: dict[PatchedModule, KnownCalls]) -> bool:
        run = self._root.plain if self.fast is None else self.fast.plain
        check = Check(self.model, run, self._trained, list(self.slots.values()), self.batch, self._loss_reduction)
        assert self.batch.size is not None
        finished = check(self.batch.size, inputs, known)
        self._expected = check.expected
        self.keeps_state |= check.keeps_state
        return finished

    def _around(self, patched: PatchedModule) -> nn.Module | None:
        """The module whose forward calls a patched module's module."""
        module = next(module for module, other in self._trained if other is patched)
        name = next((name for name, other in self.model.named_modules() if other is module), "")
        while name:
            name = name.rpartition(".")[0]
            around = self.model.get_submodule(name)
            if type(around).forward is not nn.Module.forward:  # lists and dictionaries of modules have none
                return around
        return None

    def _run_apart(self, module: nn.Module | None, parameter: nn.Parameter | None) -> bool:
        """Let a module run sample by sample, with a parameter of another one that it uses among its own. Returns
        whether that is new."""
        if module is None or (module is self.model and self.fast is not None):
            return False
        slots = [] if parameter is None else [slot for slot in self.slots.values() if slot.parameter is parameter]
        patched = patch_of(module)
        if patched is not None and (patched.rule is not fallback_forward or not slots):
            return False
        if patched is None:
            name = next(name for name, other in self.model.named_modules() if other is module)
            patched = PatchedModule(name or type(module).__name__, {}, self.batch, fallback_forward)
            if module is self.model:
                self._root.put_under(patched)
            else:
                install(module, patched)
            self._patched_modules.append((module, patched))
            self._trained.append((module, patched))
        if slots:
            path = next(name for name, p in module.named_parameters(remove_duplicate=False) if p is parameter)
            keys = [path] if len(slots) == 1 else [f"{path}[{i}]" for i in range(len(slots))]
            patched.slots |= dict(zip(keys, slots, strict=True))
        return True

    def _kind(self, inputs: tuple[Any, Any]) -> Any:
        """What a forward has in common with others that the check need not look at again."""
        leaves = pytree.tree_leaves(inputs)
        return _modes(self.model), signature(leaves, self.batch.size or 1)

    def _refuse_results(self, inputs: tuple[Any, Any]) -> None:
        """What is done between two forwards of the model cannot be looked at."""
        carriers = {id(carrier) for slot in self.slots.values() for carrier in slot.carriers}
        for leaf in _tensors(pytree.tree_leaves(inputs)):
            if leaf.grad_fn is not None and _reaches(leaf, carriers):
                raise PrivacyError(
                    f"an input of shape {tuple(leaf.shape)} was computed from results of the same model: what is done "
                    "with them in between cannot be checked. Call the model twice inside the forward of one module, "
                    "and give that to make_private"
                )

    @property
    def pending(self) -> bool:
        return any(slot.pending for slot in self.slots.values())

    @property
    def missed(self) -> bool:
        return any(slot.missed for slot in self.slots.values())

    def per_sample(self) -> list[list[Tensor] | list[OuterProducts]]:
        """Per-sample gradients after a backward pass: for each slot in order, matrices (B, ...) or their factors."""
        return [slot.parts() for slot in self.in_order]

    def lift(self, vector: Tensor) -> Iterable[tuple[Slot, Tensor]]:
        """A noisy sum over all slots -> each slot with the gradient of its parameter (or its part)."""
        sizes = [stack.dimensions for stack in self.stacks] + [slot.dimensions for slot in self._dense]
        shares = vector.split(sizes)
        for stack, share in zip(self.stacks, shares, strict=False):
            yield from stack.lift(share)
        for slot, share in zip(self._dense, shares[len(self.stacks) :], strict=True):
            yield slot, slot.spread(share)

    def mark_released(self) -> None:
        """What is in the parameters' `.grad` now is this step's noisy gradient, and no escape."""
        for slot in self.slots.values():
            slot.mark_released()

    def clear(self) -> None:
        """Forget the per-sample gradients of this micro-batch."""
        self.left_over = False
        for slot in self.slots.values():
            slot.disarm()

    def renew(self) -> None:
        """Cut the tie to forwards so far: the next one gets carriers of its own."""
        self.left_over = self.left_over or self.pending
        for slot in self.slots.values():
            slot.renew()
        self.batch.size = None

    def advance(self) -> None:
        """The logical step is over: the next forward gets new subspaces."""
        self.step += 1
        self.holding = False
        self.batch.size = None


def _install_faster(model: nn.Module, batch: Batch) -> list[tuple[nn.Module, PatchedModule]]:
    """Faster forwards on modules that train nothing."""
    found = []
    for name, module in model.named_modules():
        forward = faster_frozen(module)
        if forward is not None and patch_of(module) is None:
            found.append((module, PatchedModule(name, {}, batch, forward, for_speed=True)))
            install(*found[-1])
    return found


def _zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    """A model's own, which forgets per-sample gradients too."""
    self.__dict__["_lsg_forget"]()
    type(self).zero_grad(self, set_to_none)


_zero_grad.__name__ = "zero_grad"
register_patch(_zero_grad, "_lsg_root")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _modes(model: nn.Module) -> tuple[Any, ...]:
    """What decides how modules run beside their inputs: switches, forwards put on them, and hooks, which may do
    anything. Computed at each forward."""
    found: list[Any] = []
    for module in model.modules():
        inside = module.__dict__
        found += [id(module), id(inside.get("forward"))]
        found += [value for value in inside.values() if value is True or value is False]
        for name in _HOOKS:
            if inside[name]:
                found += [name, *inside[name]]
    return tuple(found)


def _reaches(tensor: Tensor, leaves: set[int]) -> bool:
    """Whether autograd's graph leads from a tensor to one of the leaves."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


def _refuse_escape(slot: Slot) -> Callable[[Tensor], None]:
    """Rules never differentiate a weight itself, so a gradient that reaches it came past them."""

    name, reference = slot.name, weakref.ref(slot)

    def hook(parameter: Tensor) -> None:
        slot = reference()
        # Compiled graphs call this for weights that get no gradient, too: there is none, or the last step's as it was.
        if parameter.grad is None or (slot is not None and slot.is_released(parameter.grad)):
            return
        parameter.grad = None
        raise PrivacyError(used_outside(name))

    return hook


def _refuse_packed(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Opacus's RNNs sort the samples of a packed sequence by length: their rows are not the batch's."""
    if torch.is_grad_enabled() and any(isinstance(argument, PackedSequence) for argument in args):
        raise PrivacyError(
            f"a {type(module).__name__} got a packed sequence, whose rows are sorted by length, so that samples cannot "
            "be told apart: give it the padded one, and leave padding out of the loss or the pooling"
        )


def batch_size(inputs: Any) -> int | None:
    """The leading dimension of the first tensor among a model's inputs."""
    for leaf in _tensors(pytree.tree_leaves(inputs)):
        return leaf.shape[0]
    inside: list[Tensor] = []
    mapped(lambda tensor: inside.append(tensor) or tensor, inputs)  # type: ignore[func-returns-value]
    return next((tensor.shape[0] for tensor in inside if tensor.dim()), None)


def _tensors(leaves: Iterable[Any]) -> Iterable[Tensor]:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            yield leaf
        elif isinstance(leaf, Mapping):  # transformers' BatchEncoding is a mapping that pytree does not know
            yield from _tensors(pytree.tree_leaves(dict(leaf)))
