"""A rule: how a layer runs so that each sample's gradient is left in carriers, and how it reads its weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lsg.layers.patched_module import RuleForward
from lsg.parameters.slot import Layout

OUTPUTS_FIRST, INPUTS_FIRST = Layout(transposed=True), Layout(transposed=False)  # of stored weights


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
    fused: Callable[[Any], Mapping[str, int]] = lambda module: {}
