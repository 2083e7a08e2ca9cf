"""The one table of layers: module -> rule. To add a layer, write its rule in a file of its own and a line here.

A type is matched by the forward it really runs, so a subclass that only renames a layer is covered and one that
changes what it computes is not mistaken for its parent.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from lsg.kernels import optional_triton
from lsg.layers import (
    attention,
    conv,
    embedding,
    embedding_bag,
    fallback,
    group_norm,
    layer_norm,
    linear,
    made_once,
    rms_norm,
    standardised_conv,
    subclasses,
)
from lsg.layers.instance_methods import has_own_forward
from lsg.layers.patched_module import RuleForward
from lsg.layers.rule import Rule
from lsg.models.standardised_conv import StandardisedConv2d

_BY_FORWARD: dict[Any, Rule] = {
    nn.Linear.forward: linear.LINEAR,
    nn.Embedding.forward: embedding.EMBEDDING,
    nn.EmbeddingBag.forward: embedding_bag.EMBEDDING_BAG,
    nn.Conv1d.forward: conv.CONV,
    nn.Conv2d.forward: conv.CONV,
    nn.Conv3d.forward: conv.CONV,
    StandardisedConv2d.forward: standardised_conv.STANDARDISED_CONV,
    nn.LayerNorm.forward: layer_norm.LAYER_NORM,
    nn.GroupNorm.forward: group_norm.GROUP_NORM,
    nn.InstanceNorm2d.forward: group_norm.INSTANCE_NORM,  # of the other dimensions too: they share it
    nn.MultiheadAttention.forward: attention.MULTIHEAD_ATTENTION,
}
# For what has no forward in the table, the first that fits.
_BY_LOOK: tuple[tuple[Callable[[nn.Module], bool], Rule], ...] = (
    (linear.is_conv1d, linear.CONV1D),
    (rms_norm.is_rms_norm, rms_norm.RMS_NORM),
    (made_once.has_prompts, made_once.PROMPTS),
    (lambda module: made_once.makes_relative_bias(module, "compute_bias"), made_once.T5_BIAS),
    (lambda module: made_once.makes_relative_bias(module, "compute_position_bias"), made_once.MPNET_BIAS),
    (lambda module: isinstance(module, nn.Embedding), subclasses.EMBEDDING_SUBCLASS),
    (lambda module: isinstance(module, nn.Linear), subclasses.LINEAR_SUBCLASS),
)


def rule_for(module: nn.Module) -> Rule:
    """The rule of a module that has parameters of its own (or that computes with a child's)."""
    if has_own_forward(module):  # its class does not tell what it computes
        return fallback.FALLBACK
    rule = _BY_FORWARD.get(type(module).forward)
    return rule or next((rule for fits, rule in _BY_LOOK if fits(module)), fallback.FALLBACK)


def faster_frozen(module: nn.Module) -> RuleForward | None:
    """For a module that trains nothing and so needs no rule: a forward with kernels that PyTorch does not have."""
    has_kernels = optional_triton.AVAILABLE and rule_for(module) is group_norm.GROUP_NORM
    return group_norm.frozen_group_norm_forward if has_kernels else None


def is_fallback(rule: Rule) -> bool:
    return rule is fallback.FALLBACK
