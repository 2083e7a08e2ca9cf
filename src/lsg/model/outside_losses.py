"""Losses computed outside the model: a cross-entropy's gradient tells how much each token or record weighs in it.

The gradient that arrives at logits z is w (softmax(z) - onehot(y)) for a token with label y: one negative entry, from
which w can be read off, and nothing where a token does not count. A right loss gives each record a weight of its own.
Weights that add up to 1 over the batch, though they are not 1/B each, were divided by a sum over all records: of tokens
(a mean over the batch), of records that have a label at all, of class weights.

Shapes: B = records, T = tokens, V = vocabulary or classes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lsg.errors import PrivacyError
from lsg.kernels.optional_triton import untransformed

_LOOKS = 8  # at the first so many backward passes, then at each whose number is a power of two
_SURE = 1e-3  # a token whose label is more probable than 1 - this has a gradient too small to read its weight off


class LossWatch:
    """Looks at the gradients that arrive at a model's outputs, now and then; costs nothing in between."""

    def __init__(self) -> None:
        self._forwards = 0
        self._suspicions: set[float] = set()  # divisors of batches that looked wrong, which may have been chance

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
        found = divided_by_batch(logits, gradient, records)
        if found is None:
            return
        # Divided by B times a fixed length the weights may add up to 1, too, but not for other numbers of tokens.
        by_chance = found.tokens % records == 0 or logits.element_size() < 4
        if not by_chance or self._suspicions - {found.divisor}:
            _refuse()
        self._suspicions.add(found.divisor)


class Division(NamedTuple):
    """What a loss was seen to be divided by: the number of tokens that count, or a sum of weights that differ."""

    tokens: int
    divisor: float


def refuse_token_mean(logits: Tensor, gradient: Tensor, records: int) -> None:
    """Raise PrivacyError if `gradient`, of a loss with respect to `logits`, is that of a loss divided by a sum over the
    batch. Silent where that cannot be seen."""
    if divided_by_batch(logits, gradient, records) is not None:
        _refuse()


def _refuse() -> None:
    raise PrivacyError(
        "the loss is divided by a sum over all records of the batch (of their tokens, of those that have a label, or "
        "of class weights), so that a record's gradient depends on the others and clipping would not bound its "
        "influence: use lsg.losses.per_sequence(logits, labels), or cross_entropy(..., reduction='none').mean() of one "
        "loss for each record"
    )


@torch.no_grad()
def divided_by_batch(logits: Tensor, gradient: Tensor, records: int) -> Division | None:
    """What the loss was divided by, if that is a sum over the batch. None if it is not, or cannot be seen, or if this
    is no cross-entropy of these logits."""
    tolerance = 1e-3 if logits.element_size() >= 4 else 2e-2
    totals, counts = [], []
    lightest, heaviest, unread = float("inf"), 0.0, 0
    for z_TV, g_TV in zip(logits.unbind(0), gradient.unbind(0), strict=True):  # one by one: vocabularies are large
        weights = _weights(z_TV.reshape(-1, z_TV.shape[-1]), g_TV.reshape(-1, g_TV.shape[-1]), tolerance)
        if weights is None:
            return None
        read, count = weights
        counts.append(count)
        totals.append(float(read.sum()))
        unread += count - len(read)
        if len(read):
            lightest, heaviest = min(lightest, float(read.min())), max(heaviest, float(read.max()))
    tokens = sum(counts)
    if tokens < 2 or heaviest == 0.0:
        return None
    if heaviest - lightest <= tolerance * heaviest:  # tokens weigh alike
        per_record = len(set(counts)) == 1  # then a mean over the tokens is one over the records
        return None if per_record or abs(heaviest * tokens - 1) > 2 * tolerance else Division(tokens, tokens)
    supervised = [total for total, count in zip(totals, counts, strict=True) if count]
    alike = max(supervised) - min(supervised) <= 2 * tolerance * max(supervised)
    if unread or abs(sum(totals) - 1) > tolerance or (alike and len(supervised) == records):
        return None
    return Division(tokens, 1 / heaviest)


def _weights(z_TV: Tensor, g_TV: Tensor, tolerance: float) -> tuple[Tensor, int] | None:
    """Of one record's tokens that count: the weights that can be read, and how many count. None where the gradient is
    not that of a cross-entropy."""
    counts = g_TV.ne(0).any(-1)
    z, g = z_TV[counts].float(), g_TV[counts].float()
    if not len(z):
        return g.new_zeros(0), 0
    label = g.argmin(-1, keepdim=True)
    others = torch.softmax(z, -1).scatter(-1, label, 0.0)
    rest = others.sum(-1, keepdim=True)  # 1 - p(label), without cancellation
    w = -g.gather(-1, label) / rest.clamp_min(1e-30)
    expected = others.scatter(-1, label, -rest) * w
    # Numbers of half precision may vanish.
    fits = (g - expected).abs().amax(-1) <= tolerance * g.abs().amax(-1)
    readable = rest.squeeze(-1) > _SURE
    if not bool((fits | ~readable).all()) or bool((w <= 0).any()):
        return None
    return w.squeeze(-1)[readable], len(z)


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
