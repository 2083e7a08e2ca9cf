"""Losses computed outside the model: a cross-entropy's gradient tells how much each token or record weighs in it.

The gradient that arrives at logits z is w (softmax(z) - onehot(y)) for a token with label y: one negative entry, from
which w can be read off, and nothing where a token does not count. A right loss gives each record a weight of its own.
Weights that add up to 1 over the batch, though they are not 1/B each, were divided by a sum over all records: of tokens
(a mean over the batch), of records that have a label at all, of class weights.

Shapes: B = records, T = tokens, V = vocabulary or classes.
"""

import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lsg.errors import PrivacyError
from lsg.kernels.optional_triton import untransformed
from lsg.losses import Reduction

_LOOKS = 8  # at the first so many backward passes, then at each whose number is a power of two
_AT_ONCE = 2**24  # numbers that are looked at together
_SURE = 1e-3  # a token whose label is more probable than 1 - this has a gradient too small to read its weight off


class LossWatch:
    """Looks at the gradients that arrive at a model's outputs, now and then; costs nothing in between."""

    def __init__(self, loss_reduction: Reduction = "mean") -> None:
        self._loss_reduction = loss_reduction
        self._forwards = 0
        self._other_reduction: set[int] = set()  # sizes of batches whose loss looked like one of the other reduction
        self._suspicions: set[float] = set()  # divisors of batches that looked wrong, which may have been chance
        self._divided = 0  # batches whose loss looked like the mean divided by Accelerate's number of them

    def watch(self, output: Any, records: int | None) -> None:
        """Call it after a forward of so many records: looks at what a backward pass brings to its outputs."""
        if records is None or records < 2 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._forwards += 1
        if self._forwards > _LOOKS and self._forwards & (self._forwards - 1):
            return
        if not untransformed() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        for value in pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output):
            if isinstance(value, Tensor) and _may_be_logits(value, records):
                value.register_hook(_Look(self, value, records))

    def look(self, logits: Tensor, gradient: Tensor, records: int) -> None:
        """Raise PrivacyError if the loss is surely one that depends on the whole batch; if that may be chance, the next
        time that it looks so."""
        weights = _read(logits, gradient)
        if weights is None:
            return
        self._compare_reduction(weights.reduction(), records)
        self._warn_of_division(weights.part_of_mean())
        found = weights.divided_by_batch()
        if found is None:
            return
        # Divided by B times a fixed length the weights may add up to 1, too, but not for other numbers of tokens.
        by_chance = found.tokens % records == 0 or logits.element_size() < 4
        if not by_chance or self._suspicions - {found.divisor}:
            _refuse()
        self._suspicions.add(found.divisor)

    def _compare_reduction(self, seen: Reduction | None, records: int) -> None:
        """A mean where a sum was announced makes a record's gradient depend on how many others there are, and the other
        way round. A constant factor may look so, but not in batches of two sizes."""
        if seen is None or seen == self._loss_reduction:
            return
        self._other_reduction.add(records)
        if len(self._other_reduction) > 1:
            raise PrivacyError(
                f"the loss is the {seen} over the records of a batch, and make_private was told "
                f"loss_reduction='{self._loss_reduction}', so that a record's gradient depends on others' number: "
                f"say loss_reduction='{seen}', or use a loss that is the {self._loss_reduction}"
            )

    def _warn_of_division(self, part: int | None) -> None:
        """Once, where it was seen twice: no guarantee depends on it, but how much clip and noise weigh."""
        if self._loss_reduction != "mean" or part is None or part != _accelerates_accumulation():
            return
        self._divided += 1
        if self._divided == 2:
            warnings.warn(
                f"the loss is the mean over the records divided by {part}: Accelerate's gradient_accumulation_steps="
                f"{part} divides it, so that gradients are {part} times too small for max_grad_norm, and noise weighs "
                "more. Leave gradient_accumulation_steps at 1: lsg puts logical batches together by itself",
                stacklevel=2,
            )


def _accelerates_accumulation() -> int | None:
    """By how many micro-batches `accelerator.backward` divides a loss; None without Accelerate."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return None if state is None else state().num_steps


class Division(NamedTuple):
    """What a loss was seen to be divided by: the number of tokens that count, or a sum of weights that differ."""

    tokens: int
    divisor: float


def refuse_token_mean(logits: Tensor, gradient: Tensor) -> None:
    """Raise PrivacyError if `gradient`, of a loss with respect to `logits`, is that of a loss divided by a sum over the
    batch. Silent where that cannot be seen."""
    weights = _read(logits, gradient)
    if weights is not None and weights.divided_by_batch() is not None:
        _refuse()


def _refuse() -> None:
    raise PrivacyError(
        "the loss is divided by a sum over all records of the batch (of their tokens, of those that have a label, or "
        "of class weights), so that a record's gradient depends on the others and clipping would not bound its "
        "influence: use lsg.losses.per_sequence(logits, labels), or cross_entropy(..., reduction='none').mean() of one "
        "loss for each record"
    )


class _Weights(NamedTuple):
    """How much each record weighs in a cross-entropy, by its tokens' weights."""

    totals: list[float]  # the sum of a record's weights that could be read
    counts: list[int]  # tokens of a record that count
    lightest: float
    heaviest: float
    unread: int  # tokens that count, and whose weights could not be read
    tolerance: float

    def divided_by_batch(self) -> Division | None:
        """What the loss was divided by, if that is a sum over the batch. None if it is not, or cannot be seen."""
        tokens = sum(self.counts)
        if self.heaviest - self.lightest <= self.tolerance * self.heaviest:  # tokens weigh alike
            per_record = len(set(self.counts)) == 1  # then a mean over the tokens is one over the records
            whole = abs(self.heaviest * tokens - 1) <= 2 * self.tolerance
            return Division(tokens, tokens) if whole and not per_record else None
        supervised = [total for total, count in zip(self.totals, self.counts, strict=True) if count]
        alike = max(supervised) - min(supervised) <= 2 * self.tolerance * max(supervised)
        whole = abs(sum(self.totals) - 1) <= self.tolerance
        if self.unread or not whole or (alike and len(supervised) == len(self.counts)):
            return None
        return Division(tokens, 1 / self.heaviest)

    def reduction(self) -> Reduction | None:
        """Whether all records weigh 1/B (a mean) or 1 (a sum); None for anything else."""
        weight, records = self._of_each_record(), len(self.totals)
        if weight is None:
            return None
        if abs(weight * records - 1) <= 2 * self.tolerance:
            return "mean"
        return "sum" if abs(weight - 1) <= 2 * self.tolerance else None

    def part_of_mean(self) -> int | None:
        """k where each record weighs 1 / (k B), k = 2, 3, ...; None for anything else."""
        weight, records = self._of_each_record(), len(self.totals)
        if weight is None:
            return None
        part = round(1 / (weight * records))
        return part if part > 1 and abs(weight * records * part - 1) <= 2 * self.tolerance else None

    def _of_each_record(self) -> float | None:
        """What a record weighs, where all weigh alike; None where they do not, or where that cannot be read."""
        least, most = min(self.totals), max(self.totals)
        return None if self.unread or most - least > 2 * self.tolerance * most else most


@torch.no_grad()
def _read(logits: Tensor, gradient: Tensor) -> _Weights | None:
    """The weights in a loss. None if this is no cross-entropy of these logits."""
    tolerance = 1e-3 if logits.element_size() >= 4 else 2e-2
    z_BTV, g_BTV = (t.reshape(len(t), -1, t.shape[-1]) for t in (logits, gradient))
    some = max(1, _AT_ONCE // max(1, z_BTV[0].numel()))  # records at once: vocabularies are large
    parts = [_weights(z, g, tolerance) for z, g in zip(z_BTV.split(some), g_BTV.split(some), strict=True)]
    fits, w_BT, counts_BT, read_BT = (torch.cat(kind) for kind in zip(*parts, strict=True))
    w_read = w_BT.where(read_BT, 0.0)
    lightest, heaviest = w_BT.where(read_BT, torch.inf).min(), w_read.max()
    unread = (counts_BT & ~read_BT).sum()
    summary = torch.stack([fits.all(), lightest, heaviest, unread]).tolist()  # a GPU is asked three times in all
    totals, counts = w_read.sum(1).tolist(), counts_BT.sum(1).tolist()
    if not summary[0] or sum(counts) < 2 or summary[2] == 0.0:
        return None
    return _Weights(totals, counts, summary[1], summary[2], int(summary[3]), tolerance)


def _weights(z_BTV: Tensor, g_BTV: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of some records: whether each gradient is that of a cross-entropy; the tokens' weights; which tokens count; of
    which the weights can be read."""
    counts = g_BTV.ne(0).any(-1)
    z, g = z_BTV.float(), g_BTV.float()
    label = g.argmin(-1, keepdim=True)
    others = torch.softmax(z, -1).scatter(-1, label, 0.0)
    rest = others.sum(-1, keepdim=True)  # 1 - p(label), without cancellation
    w = -g.gather(-1, label) / rest.clamp_min(1e-30)
    expected = others.scatter(-1, label, -rest) * w
    # Numbers of half precision may vanish.
    alike = (g - expected).abs().amax(-1) <= tolerance * g.abs().amax(-1)
    sure = rest.squeeze(-1) <= _SURE
    fits = ~counts | ((alike | sure) & (w.squeeze(-1) > 0))
    return fits.all(-1), w.squeeze(-1), counts, counts & ~sure


def _may_be_logits(value: Tensor, records: int) -> bool:
    return (
        value.requires_grad
        and not value.is_leaf
        and value.is_floating_point()
        and value.dim() in (2, 3)
        and value.shape[0] == records
        and value.shape[-1] > 1
    )


class _Look:
    """A hook on logits."""

    def __init__(self, watch: LossWatch, logits: Tensor, records: int) -> None:
        self._watch, self._logits, self._records = watch, logits.detach(), records

    def __call__(self, gradient: Tensor | None) -> None:
        # None for a result that the loss does not use. Gradients are on where second derivatives are asked for.
        if gradient is not None and not torch.is_grad_enabled():
            self._watch.look(self._logits, gradient, self._records)
