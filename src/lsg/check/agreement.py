"""A model with its rules against the same model without them: results by value, and gradients that stay apart."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lsg.check.kept_state import put_back, tensors_in
from lsg.check.look import ADVICE, Look, NeedsRule
from lsg.check.ownership import Trail, alike
from lsg.errors import LsgError, PrivacyError, first_line, is_out_of_memory
from lsg.layers.patched_module import Batch, KnownCalls, PatchedModule, UnknownCall
from lsg.layers.samples import SHARED, SampleAxis
from lsg.parameters.factored_calls import zeros
from lsg.parameters.slot import Slot, calls_apart

_LOOSE = 30.0  # times the tolerance: rules compute in another order than layers, and sum up


class Agreement:
    """run: one forward of the model, as the check does it."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[Any], Any],
        patched_modules: Sequence[PatchedModule],
        slots: Sequence[Slot],
        batch: Batch,
    ) -> None:
        self._model, self._run, self._patched_modules, self._slots, self._batch = (
            model,
            run,
            patched_modules,
            slots,
            batch,
        )

    def check(self, look: Look, is_random: Callable[[Look, str], bool]) -> None:
        """Raise PrivacyError where the model is another with its rules, or where a backward mixes samples."""
        known = {patched: KnownCalls() for patched in self._patched_modules}
        look.learn(known, look.size)
        with self._on_few(look.size, known):
            try:
                with put_back(self._model):  # which a backward may need as the forward left it
                    first = self._gradients(
                        look, set(), lambda patched, n, out: _compare(look, patched, n, out, is_random)
                    )
            except PrivacyError as error:  # that what samples share is one of each of them may be why
                if not look.sharing():
                    raise
                raise NeedsRule(look.sharing(), str(error)) from None
            with put_back(self._model):
                second = self._gradients(look, set(range(1, look.size)), None)
        for (name, before), (_, after) in zip(first, second, strict=True):
            mine = [None if gradient is None else gradient[0] for gradient in (before, after)]
            a, b = (torch.zeros(()) if value is None else value for value in mine)
            if a.shape != b.shape:
                a, b = torch.broadcast_tensors(a, b)
            if not alike(a, b, _LOOSE, look.base.precision):
                raise PrivacyError(
                    f"samples of a batch influence each other in the backward, at '{name}': a sample's gradient is "
                    f"another one beside other samples. {ADVICE[0].upper()}{ADVICE[1:]}. A loss that a model computes "
                    "itself must be a mean or a sum over samples (lsg.losses has such), and no hook may scale "
                    "gradients by those of a batch"
                )

    @contextmanager
    def _on_few(self, size: int, known: dict[PatchedModule, KnownCalls]) -> Iterator[None]:
        """Carriers for a few samples, of which nobody else knows."""
        batch = self._batch
        size_before = batch.size
        with ExitStack() as stack:
            for slot in self._slots:
                carriers = tuple(zeros((size, *c.shape[1:]), c.dtype, c.device) for c in slot.carriers)
                stack.enter_context(slot.borrowed(carriers))
            for patched in self._patched_modules:
                stack.enter_context(patched.borrow_known(known[patched]))
            batch.size = size
            try:
                yield
            finally:
                batch.size = size_before

    def _gradients(self, look: Look, changed: set[int], witness: Any) -> list[tuple[str, Tensor | None]]:
        """Names and per-sample gradients of a random loss, in which each sample has its own part."""
        self._batch.witness, self._batch.in_forward = witness, True
        try:
            with calls_apart(self._slots) as calls:
                output = self._run(look.few.batch(changed))
        except UnknownCall as call:
            raise PrivacyError(
                f"{call} is called in another way with lsg's rules than without them, so samples cannot be told apart: "
                "do what depends on shapes in a way that does not, or freeze its parameters"
            ) from None
        except LsgError:
            raise
        except Exception as error:
            if is_out_of_memory(error) or self._batch.may_blame_layout:  # then there is another look
                raise
            raise PrivacyError(
                f"the model fails with lsg's rules and not without them ({first_line(error)}): a value that samples "
                "share becomes one for each sample, (1, ...) or (...) becomes (B, ...). Do with it only what "
                "broadcasts, or freeze the layer that it comes from"
            ) from error
        finally:
            self._batch.witness, self._batch.in_forward = None, False
        results = list(tensors_in(output, set()))
        if not changed:
            _compare_results(look, results)
        pairs = list(_losses(look, results, changed))
        named = [(slot.name, carrier) for slot in self._slots for carrier in slot.carriers]
        named += [(s.name, c) for s, made in zip(self._slots, calls, strict=True) for c in made.made or ()]
        if not pairs:
            return [(name, None) for name, _ in named]
        outputs, weights = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, [carrier for _, carrier in named], weights, allow_unused=True)
        return [(name, gradient) for (name, _), gradient in zip(named, found, strict=True)]


def _compare(look: Look, patched: PatchedModule, number: int, out: Any, is_random: Callable[[Look, str], bool]) -> None:
    """A layer under its rule returns what it returned without."""
    call = next((c for c in look.base.calls if c.patched is patched and c.number == number), None)
    leaves = pytree.tree_leaves(out)
    if call is not None and len(call.outputs) == len(leaves):
        pairs = [(kept, leaf) for kept, leaf in zip(call.outputs, leaves, strict=True) if isinstance(kept, Trail)]
        if all(_agree(look, kept, leaf) for kept, leaf in pairs):
            return
        same_shapes = all(_fits_shape(look, kept, leaf) is not None for kept, leaf in pairs)
        if same_shapes and is_random(look, f"in layer '{patched.name}' ({call.kind})"):
            return
    kind = "" if call is None else f" ({call.kind})"
    raise PrivacyError(
        f"layer '{patched.name}'{kind} computes something else for the samples of a batch than for each of them alone: "
        "it mixes samples, or an input that they share has as many rows as there are samples (then give it a leading "
        "dimension of 1)"
    )


def _compare_results(look: Look, results: list[Tensor]) -> None:
    kept = look.base.output
    alike = [k.value.shape == r.shape and _agree(look, k, r) for k, r in zip(kept, results, strict=False)]
    if len(kept) != len(results) or not all(alike):
        shapes = [tuple(r.shape) for r in results], [tuple(trail.value.shape) for trail in kept]
        raise PrivacyError(
            f"the model returns something else with lsg's rules than without them (shapes {shapes[0]} for {shapes[1]})"
            ": a value that samples share becomes one for each sample, (1, ...) or (...) becomes (B, ...). Do with it "
            "only what broadcasts"
        )


def _fits_shape(look: Look, kept: Trail, leaf: Any) -> Tensor | None:
    """What a result without rules is for all samples under them: its own shape, and where samples share it one of each
    of them, in place of a leading 1 or not. None where shapes do not fit."""
    shape = kept.value.shape
    shapes = [shape]
    if look.axis(kept) == SHARED:
        shapes = [torch.Size((look.size, *shape)), torch.Size((look.size, *shape[1:])) if shape[:1] == (1,) else shape]
    fits = isinstance(leaf, Tensor) and leaf.shape in shapes
    return kept.value.expand(leaf.shape) if fits else None


def _agree(look: Look, kept: Trail, leaf: Any) -> bool:
    """In the lower precision of the two: under autocast norms of lsg return float32, as PyTorch's do on a GPU."""
    wanted = _fits_shape(look, kept, leaf)
    if wanted is None:
        return False
    dtypes = wanted.dtype, leaf.dtype
    dtype = min(dtypes, key=lambda dtype: dtype.itemsize) if wanted.is_floating_point() else wanted.dtype
    return alike(wanted.to(dtype), leaf.detach().to(dtype), _LOOSE, look.base.precision)


def _losses(look: Look, results: list[Tensor], changed: set[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs with the gradients that arrive there: random, and of a changed sample others than before."""
    for number, (kept, result) in enumerate(zip(look.base.output, results, strict=True)):
        axis = look.axis(kept)
        if not result.requires_grad:
            continue
        if isinstance(axis, SampleAxis):
            each = axis.split(result.detach(), look.size)
            # Those of others are long: what shortens the gradient of a batch shows.
            drawn = [_drawn(each[i], number, i + look.size * (i in changed)) for i in range(look.size)]
            drawn = [value * (1000 if i in changed else 1) for i, value in enumerate(drawn)]
            yield result, axis.join(torch.stack(drawn), result, look.size)
        elif result.numel() == 1:
            yield result, torch.ones_like(result)


def _drawn(like: Tensor, number: int, sample: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + sample)
    real = torch.randn(like.shape, generator=generator)
    return real.to(like.device, like.dtype)
