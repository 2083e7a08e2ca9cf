"""Losses in Trainer's hands: label smoothing, and heads whose own loss is a mean over the tokens of all records."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lsg.errors import ConfigurationError, first_line
from lsg.losses import per_sequence


class PerSequenceSmoother:
    """In place of Trainer's LabelSmoother, which divides by the number of tokens of all records together."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def __call__(self, output: Any, labels: Tensor, shift_labels: bool = False, **kwargs: Any) -> Tensor:
        """kwargs: `num_items_in_batch`, the number of tokens of all records, which no record's loss may depend on."""
        return per_sequence(logits_of(output), labels, label_smoothing=self.epsilon, shift=shift_labels)


class LossOfRecords:
    """A user's compute_loss_func, which gets None in place of the number of tokens of all records."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        try:
            return self._own(outputs, labels, num_items_in_batch=None)
        except TypeError as error:
            if "NoneType" not in str(error):
                raise
            raise ConfigurationError(
                f"compute_loss_func failed ({first_line(error)}): num_items_in_batch is None in private training, as "
                "no record's loss may depend on how many tokens others have. Return a mean over the batch's records of "
                "each one's own loss (lsg.losses.per_sequence for tokens)"
            ) from error


def logits_of(output: Any) -> Tensor:
    logits: Tensor = output["logits"] if isinstance(output, dict) else output[0]
    return logits


def base_model(model: nn.Module) -> nn.Module:
    """The model of transformers inside of PEFT's and of DistributedDataParallel's wrappers."""
    model = getattr(model, "module", model)
    get_base = getattr(model, "get_base_model", None)
    found: nn.Module = model if get_base is None else get_base()
    return found


def is_causal(model: nn.Module) -> bool:
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def averages_over_tokens(model: nn.Module, labels: Any) -> bool:
    """Whether the model's head, called with these labels, would average over the tokens of all records by itself.

    Heads that ask `self.loss_function` get a loss for each record from lsg. Those that compute a cross-entropy with a
    label a token on their own do not.
    """
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return False
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and "loss_function" not in code.co_names


def with_decoder_inputs(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> dict[str, Any]:
    """Encoder-decoder models make their decoder's inputs of the labels, which they will not get."""
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None or "decoder_input_ids" in inputs or "decoder_inputs_embeds" in inputs:
        return inputs
    return inputs | {"decoder_input_ids": prepare(labels=labels)}
