"""Methods that make something of parameters alone, which all samples share: each sample gets one of its own.

A relative attention bias (T5, MPNet), a table looked up by distance: (1, heads, queries, keys) becomes
(B, heads, queries, keys), which broadcasts in the same places. The virtual tokens of PEFT's prompt tuning.
"""

from typing import Any

from torch import nn

from lsg.layers.fallback import each_sample
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rule import Rule
from lsg.layers.samples import SamplePlaces

_PROMPT_ENCODERS = {"PromptEmbedding", "PromptEncoder"}  # of PEFT, named, not imported


def one_each_forward(module: Any, patched: PatchedModule, places: SamplePlaces, *args: Any, **kwargs: Any) -> Any:
    """The module's own method, once for each sample."""
    return each_sample(module, patched, places, [], args, kwargs)


def has_prompts(module: nn.Module) -> bool:
    encoders = module._modules.get("prompt_encoder")
    kinds = {type(encoder).__name__ for encoder in encoders.values()} if isinstance(encoders, nn.ModuleDict) else set()
    return bool(kinds) and kinds <= _PROMPT_ENCODERS and hasattr(module, "get_prompt")


def makes_relative_bias(module: nn.Module, method: str) -> bool:
    return isinstance(getattr(module, "relative_attention_bias", None), nn.Embedding) and hasattr(module, method)


def _relative_bias(method: str) -> Rule:
    return Rule(
        one_each_forward,
        descendants=lambda module: ("relative_attention_bias.weight",),
        method=method,
        known=None,
    )


PROMPTS = Rule(
    one_each_forward,
    descendants=lambda m: tuple(f"prompt_encoder.{name}" for name, _ in m.prompt_encoder.named_parameters()),
    method="get_prompt",
    known=None,
)
T5_BIAS, MPNET_BIAS = _relative_bias("compute_bias"), _relative_bias("compute_position_bias")
