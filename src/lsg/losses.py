"""Losses of texts that keep records apart: logits and labels in, a mean of losses that each belong to one record out.

Private training clips each record's own gradient, so nothing that belongs to one record may depend on another. A mean
over all tokens of a batch does: its divisor counts everybody's tokens.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lsg.errors import ConfigurationError

Reduction = Literal["mean", "sum", "none"]
IGNORED = -100  # the label of tokens that do not count, as in PyTorch and transformers
_AT_ONCE_BYTES = 256 * 2**20  # larger log-probabilities, of large vocabularies, are made some tokens at a time


def per_sequence(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    shift: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy as the mean over sequences of each one's mean over its own tokens.

    logits: (B, T, V), or (B, V) for one label a record. labels: (B, T), or (B,); `ignore_index` marks tokens that do
    not count. A sequence without any token that counts has the loss 0, and is still one of the B.
    shift: for causal language models whose labels are the inputs themselves: position t predicts label t + 1.
    reduction: over the sequences; as `loss_reduction` of make_private says. "none" returns (B,).
    """
    token, counts = _token_losses(logits, labels, ignore_index, label_smoothing, shift)
    return _reduce(token.sum(1) / counts.sum(1).clamp_min(1), reduction)


def per_token(
    logits: Tensor,
    labels: Tensor,
    *,
    length: float,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    shift: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    """As `per_sequence`, but each token counts alike: a sequence's loss is the sum over its tokens, over `length`.

    length: a number fixed in advance, such as the longest sequence allowed. It must not be computed from the batch.
    """
    if not length > 0:
        raise ConfigurationError(f"length={length!r} must be positive")
    token, _ = _token_losses(logits, labels, ignore_index, label_smoothing, shift)
    return _reduce(token.sum(1) / length, reduction)


def _token_losses(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, shift: bool
) -> tuple[Tensor, Tensor]:
    """Losses of tokens, 0 where they do not count, and whether they count: (B, T) each."""
    if logits.shape[:-1] != labels.shape or labels.dim() == 0:
        raise ConfigurationError(
            f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}: labels must have the "
            "shape of the logits without their last dimension, the vocabulary"
        )
    if shift:  # the labels, as the logits are far larger
        labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    counts = labels != ignore_index
    token = _cross_entropy(logits, labels.where(counts, 0), label_smoothing)
    token = token.masked_fill(~counts, 0.0)
    return token.reshape(len(token), -1), counts.reshape(len(token), -1)


def _cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """(..., V) and (...) -> (...), in float32 or better."""
    size = logits.numel() * torch.promote_types(logits.dtype, torch.float32).itemsize
    if size <= _AT_ONCE_BYTES or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _cross_entropy_at_once(logits, labels, smoothing)
    flat: Tensor = _InParts.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), smoothing)
    return flat.view_as(labels)


def _cross_entropy_at_once(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Reads the logits once and makes no copy of them."""
    log_probabilities = F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    token = -log_probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (1 - smoothing) * token - smoothing * log_probabilities.mean(-1) if smoothing else token


class _InParts(torch.autograd.Function):
    """Computes the same to the bit for logits (tokens, V), and makes log-probabilities again in the backward.

    For 128,000 words in bfloat16 they and their gradient would take four times the memory of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.smoothing = smoothing
        size = _tokens_at_once(logits)
        parts = zip(logits.split(size), labels.split(size), strict=True)
        return torch.cat([_cross_entropy_at_once(own, own_labels, smoothing) for own, own_labels in parts])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (given,) = gradients
        logits, labels = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives are asked for
            losses = _cross_entropy_at_once(logits, labels, ctx.smoothing)
            return torch.autograd.grad(losses, logits, given, create_graph=True)[0], None, None
        found = torch.empty_like(logits)
        parts = (t.split(_tokens_at_once(logits)) for t in (found, logits, labels, given))
        for place, own, own_labels, own_given in zip(*parts, strict=True):
            with torch.enable_grad():
                leaf = own.detach().requires_grad_()
                losses = _cross_entropy_at_once(leaf, own_labels, ctx.smoothing)
            place.copy_(torch.autograd.grad(losses, leaf, own_given)[0])
        return found, None, None


def _tokens_at_once(logits: Tensor) -> int:
    return max(1, _AT_ONCE_BYTES // (logits.shape[-1] * torch.promote_types(logits.dtype, torch.float32).itemsize))


def _reduce(losses: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ConfigurationError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    return losses.mean() if reduction == "mean" else losses.sum()
