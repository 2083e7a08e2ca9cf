"""Language models: a hub id or a local folder in, a model that writes texts out; and a trained one back to disk.

As in `lsg.tasks.models`, nothing that is loaded can run code.
"""

from pathlib import Path
from typing import Any

from torch import nn

from lsg.errors import ConfigurationError, first_line
from lsg.extras import needs_extra
from lsg.tasks.models import any_config, pretrained, save_text_model, weight_matrices
from lsg.tasks.quiet_transformers import quiet_transformers

SCALE = 2  # of LoRA: alpha over rank


def language_config(name: str) -> Any:
    """The model's configuration, refused where the architecture writes no texts."""
    with quiet_transformers():
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        )

        config = any_config(name)
    writers = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in writers:
        raise ConfigurationError(
            f"--model {name}: a {config.model_type} model writes no texts: transformers has no language model of it"
        )
    return config


def load_language_model(name: str) -> Any:
    """A causal model, or an encoder and decoder, with all of its weights from its files."""
    config = language_config(name)
    with quiet_transformers():
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model, new = pretrained(kind, name, config)
    if new:
        some = ", ".join(sorted(new)[:3])
        raise ConfigurationError(f"--model {name}: its files lack weights of a {type(model).__name__} ({some})")
    return model


def select_written(model: nn.Module, trainable: str) -> None:
    """Set which parameters of a language model train; see RunConfig.trainable. "paper" trains the weight matrices of
    its blocks: tables of tokens, and the output layer, stay as they were pretrained."""
    tables = {id(table.weight) for table in model.modules() if isinstance(table, nn.Embedding)}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    tables |= set() if output is None else {id(parameter) for parameter in output.parameters()}
    weights = {id(parameter) for parameter in weight_matrices(model)} - tables
    for parameter in model.parameters():
        parameter.requires_grad = {
            "all": True,
            "bias": parameter.ndim == 1,
            "paper": id(parameter) in weights,
        }[trainable]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(f"--trainable {trainable}: a {type(model).__name__} has no such weights")


def with_adapters(model: Any, rank: int) -> Any:
    """The model with LoRA's adapters, which alone are trained, on the layers that PEFT chooses for its architecture.

    New weights come from torch's global random stream.
    """
    with needs_extra("transformers", "--lora"):
        from peft import LoraConfig, get_peft_model

    highest = max(min(weight.shape) for weight in model.parameters() if weight.ndim > 1)
    if rank > highest:
        raise ConfigurationError(
            f"--lora {rank}: no matrix of this model has a rank above {highest}: give that number or less"
        )
    kind = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    try:
        with quiet_transformers():
            return get_peft_model(model, LoraConfig(r=rank, lora_alpha=SCALE * rank, task_type=kind))
    except ValueError as error:
        raise ConfigurationError(
            f"--lora {rank}: PEFT does not know which layers of a {model.config.model_type} model to adapt "
            f"({first_line(error)}); train its weights without --lora"
        ) from None


def save_language_model(folder: Path, model: Any, tokenizer: Any, base: str | None, *, merge: bool) -> None:
    """As transformers' `from_pretrained` reads it; adapters as PEFT's, unless they are merged into the weights.

    base: what the adapters' file may name as the model that they belong to; None where that has no name.
    """
    if not hasattr(model, "peft_config"):
        save_text_model(folder, model, tokenizer)
        return
    if merge:
        save_text_model(folder, model.merge_and_unload(), tokenizer)
        return
    for config in model.peft_config.values():
        config.base_model_name_or_path = base or ""  # PEFT would write down the path that it was read from
    save_text_model(folder, _Adapters(model), tokenizer)
    (folder / "README.md").unlink(missing_ok=True)  # a model card that PEFT makes of what it finds


class _Adapters:
    """A model whose adapters alone are saved."""

    def __init__(self, model: Any) -> None:
        self._model, self.config = model, model.config

    def save_pretrained(self, folder: Path) -> None:
        self._model.save_pretrained(folder, save_embedding_layers=False)
