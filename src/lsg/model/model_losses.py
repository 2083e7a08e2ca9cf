"""Losses that a model computes itself: transformers' heads get ones that keep records apart, others are looked at.

Heads of transformers that are called with `labels=` average over all tokens of the batch, so that a record's gradient
depends on the lengths of the others. Most compute their loss by `self.loss_function`. While a model is private, that is
a function of ours with the same arguments. What a model computes in another way is the business of `loss_check.py`.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.errors import PrivacyError
from lsg.losses import IGNORED, Reduction, per_sequence

_KEY = "_loss_function"  # where a model of transformers keeps a loss function that is not the default of its class


class ModelLosses:
    """Replaces the loss functions of all models of transformers inside `model`, until `remove`."""

    def __init__(self, model: nn.Module, reduction: Reduction) -> None:
        self._before: list[tuple[nn.Module, Any]] = []
        for name, module in model.named_modules():
            plain = _loss_function(module)
            known = next((ours for theirs, ours in _known() if theirs is plain), None)
            if plain is None or known is None:
                continue
            label = f"model '{name}' ({type(module).__name__})" if name else type(module).__name__
            self._before.append((module, module.__dict__.get(_KEY)))
            module.__dict__[_KEY] = RecordLoss(label, plain, known, reduction)

    def remove(self) -> None:
        for module, before in self._before:
            if not isinstance(module.__dict__.get(_KEY), RecordLoss):  # somebody has set another one meanwhile
                continue
            del module.__dict__[_KEY]
            if before is not None:
                module.__dict__[_KEY] = before


class RecordLoss:
    """Called as the loss function `plain` of transformers: the mean or sum of losses that each belong to one record.
    On a copy or a pickle of the model there is `plain` in its place."""

    def __init__(
        self, label: str, plain: Callable[..., Any], known: Callable[..., Tensor], reduction: Reduction
    ) -> None:
        self._label, self._plain, self._known, self._reduction = label, plain, known, reduction

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("num_items_in_batch", None)  # Trainer's: the number of tokens of all records together
        try:
            losses = self._known(*args, **kwargs)
        except _NotApartError as error:
            raise PrivacyError(
                f"{self._label} computes its loss from {error}, in which records cannot be told apart: call it without "
                "labels, and compute the loss outside, with lsg.losses.per_sequence(logits, labels)"
            ) from None
        return losses.mean() if self._reduction == "mean" else losses.sum()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self._plain

    def __reduce__(self) -> Any:
        return _itself, (self._plain,)


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a pickle of a RecordLoss is loaded by."""
    return function


class _NotApartError(Exception):
    """Shapes that do not show which record a number belongs to."""


def _loss_function(module: nn.Module) -> Callable[..., Any] | None:
    """The one that a model of transformers would use, without the warning that asking a headless one would give."""
    losses = sys.modules.get("transformers.loss.loss_utils")  # imported by whoever has such a model
    if losses is None or not isinstance(getattr(type(module), "loss_function", None), property):
        return None
    own = module.__dict__.get(_KEY)
    default = losses.LOSS_MAPPING.get(getattr(module, "loss_type", None), losses.ForCausalLMLoss)
    found: Callable[..., Any] = default if own is None else own
    return found


def _known() -> list[tuple[Callable[..., Any], Callable[..., Tensor]]]:
    """transformers' loss functions, each with one that returns the losses of the records, (B,)."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    ours: dict[str, Callable[..., Tensor]] = {
        "ForCausalLMLoss": _causal,
        "ForMaskedLMLoss": _tokens,
        "ForTokenClassification": _tokens,
        "ForSequenceClassificationLoss": _classification,
        "ForQuestionAnsweringLoss": _question_answering,
        "ForSemanticSegmentationLoss": _segmentation,
    }
    return [(getattr(losses, name), loss) for name, loss in ours.items() if hasattr(losses, name)]


def _record_losses(logits: Tensor, labels: Tensor, ignore_index: int = IGNORED, *, shift: bool = False) -> Tensor:
    """(B,) from logits (B, ..., V)."""
    if logits.shape[:-1] != labels.shape:
        shapes = f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}"
        raise _NotApartError(shapes)
    labels = labels.to(logits.device)
    return per_sequence(logits, labels, ignore_index=ignore_index, shift=shift, reduction="none")


def _tokens(logits: Tensor, labels: Tensor, *args: Any, ignore_index: int = IGNORED, **kwargs: Any) -> Tensor:
    """args, kwargs: the vocabulary's size, or the config."""
    if logits.dim() < 3:  # tokens of all records in one row
        raise _NotApartError(f"logits of shape {tuple(logits.shape)}")
    return _record_losses(logits, labels, ignore_index)


def _causal(
    logits: Tensor,
    labels: Tensor | None,
    *args: Any,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """shift_labels: labels that are shifted already."""
    if logits.dim() < 3:
        raise _NotApartError(f"logits of shape {tuple(logits.shape)}")
    target = labels if shift_labels is None else shift_labels
    assert target is not None
    return _record_losses(logits, target, ignore_index, shift=shift_labels is None)


def _classification(
    labels: Tensor, pooled_logits: Tensor, config: Any, *, ignore_index: int = IGNORED, **kwargs: Any
) -> Tensor:
    """Of a whole sequence or image: regression, one label or several. As in transformers, the config learns which."""
    size = len(pooled_logits)
    labels = labels.to(pooled_logits.device)
    if labels.numel() == 0 or labels.shape[0] != size:
        raise _NotApartError(f"logits of shape {tuple(pooled_logits.shape)} and labels of shape {tuple(labels.shape)}")
    if config.problem_type is None:
        whole = labels.dtype in (torch.long, torch.int)
        several = "single_label_classification" if whole else "multi_label_classification"
        config.problem_type = "regression" if config.num_labels == 1 else several
    if config.problem_type == "single_label_classification":
        return _record_losses(pooled_logits, labels.view(size, *pooled_logits.shape[1:-1]), ignore_index)
    given = labels.view(pooled_logits.shape)
    if config.problem_type == "regression":
        each = F.mse_loss(pooled_logits, given, reduction="none")
    else:
        each = F.binary_cross_entropy_with_logits(pooled_logits, given, reduction="none")
    return each.reshape(size, -1).mean(1)


def _question_answering(
    start_logits: Tensor, end_logits: Tensor, start_positions: Tensor, end_positions: Tensor, **kwargs: Any
) -> Tensor:
    """Positions outside the text do not count, as in transformers."""
    outside = start_logits.shape[1]
    found = []
    for logits, positions in ((start_logits, start_positions), (end_logits, end_positions)):
        inside = positions.view(len(logits), -1).squeeze(-1).clamp(0, outside)
        found.append(_record_losses(logits, inside, outside))
    return (found[0] + found[1]) / 2


def _segmentation(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = 255,
    auxiliary_logits: Tensor | None = None,
    auxiliary_loss_weight: float = 0.4,
    **kwargs: Any,
) -> Tensor:
    """Of each image the mean over its own pixels that count."""
    found = []
    for part in (logits, auxiliary_logits):
        if part is not None:
            size = labels.shape[-2:]
            whole = F.interpolate(part, size=size, mode="bilinear", align_corners=False)
            found.append(_record_losses(whole.movedim(1, -1), labels, ignore_index))
    return found[0] if len(found) == 1 else found[0] + auxiliary_loss_weight * found[1]
