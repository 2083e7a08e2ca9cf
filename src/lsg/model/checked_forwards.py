"""Which kinds of forwards of a model have been checked, and what was learnt of the calls of its layers."""

from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from lsg.check.independence import Check
from lsg.check.kept_state import tensors_in
from lsg.check.look import Expected, NeedsRule
from lsg.distributed.sharded_model import ShardedModel
from lsg.errors import PrivacyError, is_out_of_memory
from lsg.files.sign_of_life import doing
from lsg.layers.patched_module import KnownCalls, PatchedModule
from lsg.layers.samples import signature
from lsg.losses import Reduction
from lsg.model.module_rules import ModuleRules
from lsg.model.recorder import Recorder
from lsg.model.root_forward import RootForward
from lsg.speed.fast_forward import FastForward

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CheckedForwards:
    """Runs the check before the first forward of each kind (`_kind`)."""

    def __init__(
        self,
        model: nn.Module,
        rules: ModuleRules,
        recorder: Recorder,
        root: RootForward,
        fast: FastForward | None,
        loss_reduction: Reduction,
        sharded: ShardedModel | None = None,
    ) -> None:
        """sharded: the model's weights, where they are shared out over ranks: then ranks begin forwards together."""
        self._sharded = sharded
        self._model, self._rules, self._recorder, self._root, self._fast = model, rules, recorder, root, fast
        self._batch, self._loss_reduction = recorder.batch, loss_reduction
        self._known: dict[Any, dict[PatchedModule, KnownCalls]] = {}  # calls that were seen, for each kind
        self._finished: set[Any] = set()  # kinds of which the check saw enough
        self._expected: Expected | None = None  # of the forward in flight, if it was just looked at
        self.keeps_state = False  # whether the model was seen to keep anything from batch to batch

    def known_calls(self, inputs: tuple[Any, Any]) -> dict[PatchedModule, KnownCalls]:
        """What is known of a forward with these inputs; checks it if there was none of its kind."""
        kind = self._kind(inputs)
        wanted = kind not in self._finished and self._batch.size is not None and not self._is_single(kind)
        if self._sharded is not None:
            # Samples of a batch of one are not to be told apart, and of a filler nothing is kept.
            wanted = wanted and not (self._batch.filler and self._batch.size == 1)
            self._sharded.check_together(wanted, lambda: self.check(inputs))
        elif wanted:
            self.check(inputs)
        return self._known.get(kind, {})

    def check(self, inputs: tuple[Any, Any]) -> None:
        """Samples stay apart, and the model computes the same with its rules as without; raises where it does not."""
        kind = self._kind(inputs)
        if self._batch.channels_last_norms is None:
            self._batch.channels_last_norms = True
        finished, rules, why = None, None, ""
        while finished is None or rules != self._present_rules():  # a subclass may change its rule
            rules = self._present_rules()
            known = self._known.setdefault(kind, {})
            for _, patched in self._rules.trained:
                known.setdefault(patched, KnownCalls())
            try:
                finished = self._look_at_layouts(inputs, known)
            except NeedsRule as needed:
                why = why or str(needed)
                root = self._root if self._fast is None else None
                for place, parameter in needed.wanted:
                    if not self._rules.run_each_sample(place, parameter, root):
                        raise PrivacyError(why) from None
            except PrivacyError as error:
                raise PrivacyError(why or str(error)) from error
        if finished:
            self._finished.add(kind)

    def _present_rules(self) -> list[Any]:
        return [patched.rule for _, patched in self._rules.trained]

    def _look_at_layouts(self, inputs: tuple[Any, Any], known: dict[PatchedModule, KnownCalls]) -> bool:
        """Looks with norms that lay out their output channels last. Where the model fails with those, looks once more
        with PyTorch's own layout, which a model may insist on (`view`), and keeps it if the model runs then."""
        try:
            return self._look(inputs, known)
        except PrivacyError:
            raise
        except Exception as error:
            if is_out_of_memory(error) or not self._batch.may_blame_layout:
                raise
        self._batch.channels_last_norms = False
        try:
            return self._look(inputs, known)
        except Exception:
            self._batch.channels_last_norms = True
            raise

    def _look(self, inputs: tuple[Any, Any], known: dict[PatchedModule, KnownCalls]) -> bool:
        run = self._root.replaced if self._fast is None else self._fast.own_forward
        slots = list(self._recorder.slots.values())
        check = Check(self._model, run, self._rules.trained, slots, self._batch, self._loss_reduction)
        assert self._batch.size is not None
        with doing("checking that samples stay apart"):
            finished = check(self._batch.size, inputs, known)
        self._expected = check.expected
        self.keeps_state |= check.keeps_state
        return finished

    def refuse_others(self, output: Any) -> None:
        """A forward is over: raise where it returned something else than the check on a few records has seen."""
        expected, self._expected = self._expected, None
        if expected is not None and self._batch.size is not None:
            expected.refuse_others(list(tensors_in(output, set())), self._batch.size)

    def _kind(self, inputs: tuple[Any, Any]) -> Any:
        """What a forward has in common with others that the check need not look at again."""
        return _modes(self._model), signature(pytree.tree_leaves(inputs), self._batch.size or 1)

    def _is_single(self, kind: Any) -> bool:
        """Whether a batch is of one sample, and the model was looked at with several in the same mode."""
        return self._batch.size == 1 and any(modes == kind[0] for modes, _ in self._finished)


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
