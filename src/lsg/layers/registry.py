"""The one table of layer families: module type -> rule, and how each rule reads its weights.

A type is matched by the forward it really runs, so a subclass that only renames a layer is covered and one that
changes what it computes is not mistaken for its parent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lsg.kernels import optional_triton
from lsg.layers import attention, conv, embedding, embedding_bag, fallback, linear, norm
from lsg.layers import subclasses as intercept
from lsg.layers.instance_methods import has_own_forward
from lsg.layers.patched_module import RuleForward
from lsg.parameters.slot import Layout


@dataclass(frozen=True)
class Rule:
    """forward: the rule. layouts: local names of weights that can be projected -> how they are read.

    descendants: parameters of children that the rule itself computes with. method: which method of the module it
    replaces. known: the parameters it computes with, None for any. fused: local names of fused query-key-value
    weights -> the dimension that holds the three.
    """

    forward: RuleForward
    layouts: Callable[[Any], Mapping[str, Layout]] = lambda module: {}
    descendants: Callable[[Any], tuple[str, ...]] = lambda module: ()
    method: str = "forward"
    known: frozenset[str] | None = frozenset({"weight", "bias"})
    fused: Callable[[Any], Mapping[str, int]] = field(default=lambda module: {})


_OUTPUTS_FIRST, _INPUTS_FIRST = Layout(transposed=True), Layout(transposed=False)


def _conv_layouts(module: nn.Conv2d) -> Mapping[str, Layout]:
    # The paper puts L on the output channels here (errata). Grouped kernels are small: they stay dense.
    if module.groups > 1:
        return {}
    return {"weight": Layout(transposed=False, taps=module.weight[0, 0].numel())}


_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")


def _attention_layouts(module: nn.MultiheadAttention) -> Mapping[str, Layout]:
    return {name: _OUTPUTS_FIRST for name in _ATTENTION_WEIGHTS}


def _conv1d_fused(module: Any) -> Mapping[str, int]:
    inputs, outputs = module.weight.shape
    return {"weight": 1} if outputs == 3 * inputs else {}


def _linear_fused(module: nn.Linear) -> Mapping[str, int]:
    return {"weight": 0} if module.out_features == 3 * module.in_features else {}


_LINEAR = Rule(linear.linear_forward, lambda m: {"weight": _OUTPUTS_FIRST}, fused=_linear_fused)
_EMBEDDING = Rule(embedding.embedding_forward, lambda m: {"weight": _INPUTS_FIRST})
_CONV = Rule(conv.conv_forward, _conv_layouts)
_INSTANCE_NORM = Rule(norm.instance_norm_forward)
_FALLBACK = Rule(fallback.fallback_forward, known=None)
_CONV1D = Rule(linear.conv1d_forward, lambda m: {"weight": _INPUTS_FIRST}, fused=_conv1d_fused)
_RELATIVE_BIAS = {
    method: Rule(
        fallback.one_each_forward,
        descendants=lambda module: ("relative_attention_bias.weight",),
        method=method,
        known=None,
    )
    for method in ("compute_bias", "compute_position_bias")
}

# PEFT's prompt tuning: virtual tokens, made once and repeated for the batch.
_PROMPT = Rule(
    fallback.one_each_forward,
    descendants=lambda m: tuple(f"prompt_encoder.{name}" for name, _ in m.prompt_encoder.named_parameters()),
    method="get_prompt",
    known=None,
)
_PROMPT_ENCODERS = {"PromptEmbedding", "PromptEncoder"}  # of PEFT, named, not imported

_BY_FORWARD: dict[Any, Rule] = {
    nn.Linear.forward: _LINEAR,
    nn.Embedding.forward: _EMBEDDING,
    nn.EmbeddingBag.forward: Rule(embedding_bag.embedding_bag_forward, _EMBEDDING.layouts),
    nn.Conv1d.forward: _CONV,
    nn.Conv2d.forward: _CONV,
    nn.Conv3d.forward: _CONV,
    nn.LayerNorm.forward: Rule(norm.layer_norm_forward),
    nn.GroupNorm.forward: Rule(norm.group_norm_forward),
    nn.InstanceNorm2d.forward: _INSTANCE_NORM,
    nn.MultiheadAttention.forward: Rule(
        attention.multihead_attention_forward,
        _attention_layouts,
        descendants=lambda module: ("out_proj.weight", "out_proj.bias"),
        known=frozenset({*_ATTENTION_WEIGHTS, "in_proj_bias", "bias_k", "bias_v", "out_proj.bias"}),
        fused=lambda m: {"in_proj_weight": 0},
    ),
}
_BY_PARENT: tuple[tuple[type[nn.Module], Rule], ...] = (
    (nn.Embedding, Rule(intercept.intercepted_forward, _EMBEDDING.layouts, known=None)),
    (nn.Linear, Rule(intercept.intercepted_forward, _LINEAR.layouts, known=None, fused=_linear_fused)),
)


def rule_for(module: nn.Module) -> Rule:
    """The rule of a module that has parameters of its own (or that computes with a child's)."""
    if has_own_forward(module):  # its class does not tell what it computes
        return _FALLBACK
    rule = _BY_FORWARD.get(type(module).forward)
    if rule is not None:
        return rule
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return _CONV1D  # named, not imported: transformers is an extra
    encoders = module._modules.get("prompt_encoder")
    kinds = {type(encoder).__name__ for encoder in encoders.values()} if isinstance(encoders, nn.ModuleDict) else set()
    if kinds and kinds <= _PROMPT_ENCODERS and hasattr(module, "get_prompt"):
        return _PROMPT
    if isinstance(getattr(module, "relative_attention_bias", None), nn.Embedding):
        for method, relative_rule in _RELATIVE_BIAS.items():
            if hasattr(module, method):
                return relative_rule
    for parent, parent_rule in _BY_PARENT:
        if isinstance(module, parent):
            return parent_rule
    return _FALLBACK


def faster_frozen(module: nn.Module) -> RuleForward | None:
    """For a module that trains nothing and so needs no rule: a forward with kernels that PyTorch does not have."""
    has_kernels = optional_triton.AVAILABLE and rule_for(module).forward is norm.group_norm_forward
    return norm.frozen_group_norm_forward if has_kernels else None


def is_fallback(rule: Rule) -> bool:
    return rule is _FALLBACK
