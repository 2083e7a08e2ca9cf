"""Decides how each parameter is treated: a model and a method in, one row a parameter out. Looks at shapes, not values.

Projected: trained through L and R. Dense: trained through its own clipped gradient. Frozen: not trained.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import nn

from lsg.errors import ConfigurationError
from lsg.layers.registry import is_fallback, rule_for
from lsg.layers.rule import Rule
from lsg.methods import Method
from lsg.parameters.slot import Layout, narrowed

if TYPE_CHECKING:
    from lsg.methods import Selector


@dataclass(frozen=True)
class Use:
    """A module that computes with trained parameters: local name -> global name of each."""

    name: str
    module: nn.Module
    rule: Rule
    parameters: dict[str, str]


@dataclass(frozen=True)
class Treatment:
    """What happens to one parameter. `narrow` is set for each third of a split query-key-value weight."""

    name: str
    parameter: nn.Parameter
    kind: Literal["projected", "dense", "frozen"]
    layout: Layout | None = None
    narrow: tuple[int, int, int] | None = None
    maskable: bool = False  # a weight matrix that Sparse DPSGD masks element by element
    scale: float = 1.0
    why: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(narrowed(self.parameter.shape, self.narrow))


@dataclass(frozen=True)
class Treatments:
    """uses: the modules that need a rule. parameters: one treatment for each, in the model's order."""

    uses: tuple[Use, ...]
    parameters: tuple[Treatment, ...]
    splits: dict[str, list[str]] = field(default_factory=dict)  # name of a fused weight -> names of its parts


def treat_parameters(model: nn.Module, method: Method, trained: Iterable[nn.Parameter] | None = None) -> Treatments:
    """`trained` defaults to the parameters that require a gradient."""
    names = {id(p): name for name, p in model.named_parameters()}
    wanted = {id(p) for p in (model.parameters() if trained is None else trained) if p.requires_grad}
    uses = tuple(_uses(model, names, wanted))
    by_parameter: dict[str, list[tuple[Use, str]]] = defaultdict(list)
    for use in uses:
        for local, name in use.parameters.items():
            by_parameter[name].append((use, local))
    head = _head_names(uses, method)
    treatments: list[Treatment] = []
    splits: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in wanted:
            treatments.append(Treatment(name, parameter, "frozen", why="not trained"))
            continue
        parts = _treat(name, parameter, by_parameter[name], method, method.head_scale if name in head else 1.0)
        if len(parts) > 1:
            splits[name] = [part.name for part in parts]
        treatments.extend(parts)
    return Treatments(uses, tuple(treatments), splits)


def _uses(model: nn.Module, names: dict[int, str], wanted: set[int]) -> Iterator[Use]:
    claimed: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in claimed or isinstance(module, nn.ParameterList | nn.ParameterDict):
            continue
        rule = rule_for(module)
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for alias in getattr(module, "new_to_old", ()):  # Opacus's RNNs show their children's parameters as theirs
            own.pop(alias, None)
        for child_name, child in module.named_children():
            if isinstance(child, nn.ParameterList | nn.ParameterDict):
                own |= {f"{child_name}.{key}": p for key, p in child.named_parameters()}
        for path in rule.descendants(module):
            owner, _, leaf = path.rpartition(".")
            descendant = module.get_submodule(owner)
            claimed.add(id(descendant))
            if getattr(descendant, leaf, None) is not None:
                own[path] = getattr(descendant, leaf)
        parameters = {local: names[id(p)] for local, p in own.items() if id(p) in wanted}
        for local in parameters:
            if rule.known is not None and local not in rule.known:
                raise ConfigurationError(
                    f"parameter '{parameters[local]}' is not one that a {type(module).__name__} has by itself: no "
                    "per-sample rule covers it. Remove what added it"
                )
        if parameters:
            yield Use(name, module, rule, parameters)


def _treat(
    name: str, parameter: nn.Parameter, uses: list[tuple[Use, str]], method: Method, scale: float
) -> list[Treatment]:
    layouts = [use.rule.layouts(use.module).get(local) for use, local in uses]
    layout = layouts[0] if layouts else None
    if layout is None or any(other is None or other.taps != layout.taps for other in layouts):
        why = "no low-rank rule for its layer" if uses and is_fallback(uses[0][0].rule) else "not a weight matrix"
        return [Treatment(name, parameter, "dense", scale=scale, why=why)]
    modules = [use.module for use, _ in uses]
    if _selected(name, modules, method.dense):
        return [Treatment(name, parameter, "dense", scale=scale, why="kept dense by the method's `dense`")]
    use, local = uses[0]
    dimension = use.rule.fused(use.module).get(local) if method.fused_qkv == "split" and len(uses) == 1 else None
    if method.rank is None or dimension is None:
        return [_project(name, parameter, layout, None, method, scale, _selected(name, modules, method.project))]
    third = parameter.shape[dimension] // 3
    forced = _selected(name, modules, method.project)
    narrows = [(dimension, i * third, third) for i in range(3)]
    return [_project(f"{name}[{i}]", parameter, layout, n, method, scale, forced) for i, n in enumerate(narrows)]


def _project(
    name: str,
    parameter: nn.Parameter,
    layout: Layout,
    narrow: tuple[int, int, int] | None,
    method: Method,
    scale: float,
    forced: bool,
) -> Treatment:
    if method.rank is None:
        return Treatment(name, parameter, "dense", None, narrow, maskable=True, scale=scale, why="full rank")
    shape = narrowed(parameter.shape, narrow)
    m, n = shape[0], shape[1:].numel()
    if forced or method.rank * (m + n) < m * n:
        why = "asked for by the method's `project`" if forced else f"r(m+n) = {method.rank * (m + n)} < mn = {m * n}"
        return Treatment(name, parameter, "projected", layout, narrow, scale=scale, why=why)
    why = f"r(m+n) = {method.rank * (m + n)} >= mn = {m * n}"
    return Treatment(name, parameter, "dense", None, narrow, scale=scale, why=why)


def _selected(name: str, modules: list[nn.Module], selectors: tuple[Selector, ...]) -> bool:
    for selector in selectors:
        if isinstance(selector, str):
            if fnmatch.fnmatchcase(name, selector):
                return True
        elif any(isinstance(module, selector) for module in modules):
            return True
    return False


def _head_names(uses: tuple[Use, ...], method: Method) -> set[str]:
    """Parameters whose gradients are scaled before clipping."""
    if method.head_scale == 1.0:
        return set()
    if method.head:
        names = [name for use in uses for name in use.parameters.values()]
        found = {name for name in names for pattern in method.head if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise ConfigurationError(f"head={method.head}: no trained parameter has such a name")
        return found
    linears = [use for use in uses if isinstance(use.module, nn.Linear)]
    return set(linears[-1].parameters.values()) if linears else set()
