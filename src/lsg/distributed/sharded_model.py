"""A model that was given to FSDP2's `fully_shard`: where its parameters are, gathered and sharded, and when.

FSDP2 puts the gathered parameter into a module while the module computes, and the sharded one, which the optimizer has,
at other times. All ranks gather together, so all must run as many forwards and backwards.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lsg.distributed.group import Group
from lsg.distributed.sharding import is_sharded
from lsg.errors import ConfigurationError

_ONE_WAY = "lsg trains models sharded by fully_shard over one dimension of all processes, in rows (Shard(0))"


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called with."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)  # loaded by whoever has one
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module) -> None:
    """Have each module hold its sharded parameters, as an optimizer made from the model has them."""
    for module in sharded_modules(model):
        module.reshard()


def check_sharding(model: nn.Module, group: Group) -> None:
    """Refuse, by name, a way of sharding that lsg does not know."""
    sharded = {name: parameter for name, parameter in model.named_parameters() if is_sharded(parameter)}
    modules = sharded_modules(model)
    if not sharded and not modules:
        return
    if model not in modules:
        raise ConfigurationError(
            f"'{next(iter(sharded), 'a module')}' is sharded, but the model itself ({type(model).__name__}) was not "
            f"given to fully_shard: call fully_shard(model) after its layers. {_ONE_WAY}"
        )
    from torch.distributed.tensor import Shard  # takes a second to load, which others need not wait

    for name, parameter in sharded.items():
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        if mesh.ndim != 1 or placements != (Shard(0),) or mesh.size() != group.size:
            raise ConfigurationError(
                f"parameter '{name}' has placements {placements} on a mesh of shape {tuple(mesh.shape)}, of "
                f"{group.size} processes: {_ONE_WAY}; no replicas of shards (HSDP), no tensor parallelism, no "
                "shard_placement_fn for other dimensions"
            )
    for module in modules:
        for part in _param_groups(module):
            if getattr(part, "_use_post_forward_mesh", False):
                raise ConfigurationError(
                    f"a {type(module).__name__} has reshard_after_forward= a number of processes: give True or False"
                )


class ShardedModel:
    """Knows each sharded parameter's gathered counterpart. Made by all ranks together, as are the calls of methods that
    say so. One module's parameters are gathered at a time to find them."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.group = group
        self._modules = sharded_modules(model)
        reshard(model)
        # Each sharded parameter's places in modules: a tied one has several.
        self._places: dict[int, tuple[dict[str, Any], str]] = {}
        sharded: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if is_sharded(parameter):
                    self._places.setdefault(id(parameter), (module._parameters, name))
                    sharded[id(parameter)] = cast(nn.Parameter, parameter)
        self._sharded = sharded  # kept, so that no other object can get their ids
        self._gathered: dict[int, nn.Parameter] = {}
        self._first: list[tuple[Any, nn.Parameter]] = []  # a module, and a parameter that it gathers
        for module in self._modules:
            module.unshard()
            found = [key for key in sharded if self._now(key) is not sharded[key]]
            self._gathered |= {key: self._now(key) for key in found}
            if found:
                self._first.append((module, sharded[found[0]]))
            module.reshard()

    def _now(self, key: int) -> nn.Parameter:
        space, name = self._places[key]
        found: nn.Parameter = space[name]
        return found

    def in_use(self, parameter: nn.Parameter) -> Callable[[], nn.Parameter] | None:
        """How to read what a module holds of this parameter now; None for one that is not sharded."""
        return partial(self._now, id(parameter)) if id(parameter) in self._places else None

    def gathered(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The parameter that takes this one's place while it is gathered, always the same object."""
        return self._gathered.get(id(parameter))

    def reshard(self) -> None:
        """Let go of gathered weights, before an optimizer changes the sharded ones."""
        for module in self._modules:
            module.reshard()

    def check_together(self, wanted: bool, check: Callable[[], None]) -> None:
        """All ranks begin a forward. Where some have to check something first, those do, while all weights are gathered
        on all ranks, so that trial runs take no collectives. What one rank refuses ends the forward on all."""
        if not self.group.any(wanted, "a forward of the model"):
            return
        with self._all_gathered():
            self.group.together(check if wanted else _nothing)

    @contextmanager
    def _all_gathered(self) -> Iterator[None]:
        """The whole model on each rank, and modules that neither gather nor shard."""
        waiting = [module for module, parameter in self._first if self._now(id(parameter)) is parameter]
        for module in waiting:
            module.unshard()
        try:
            with _casts_alone(self._modules):
                yield
        finally:
            for module in waiting:
                module.reshard()


def _param_groups(module: Any) -> Iterable[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    found: Iterable[Any] = groups
    return found


@contextmanager
def _casts_alone(modules: list[Any]) -> Iterator[None]:
    """In place of FSDP2's own hooks ones that only cast, by the MixedPrecisionPolicy: inputs and outputs are what they
    are in training, and nothing is gathered, sharded or waited for."""
    changed: list[tuple[Any, int, Any]] = []
    try:
        for module in modules:
            state = module._get_fsdp_state()
            policy = state._mp_policy
            for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
                for single in getattr(handle, "handles", (handle,)):
                    for hooks, hook in (
                        (module._forward_pre_hooks, _Cast(policy.param_dtype if policy.cast_forward_inputs else None)),
                        (module._forward_hooks, _CastOutput(policy.output_dtype)),
                    ):
                        if single.id in hooks:
                            changed.append((hooks, single.id, hooks[single.id]))
                            hooks[single.id] = hook
        yield
    finally:
        for hooks, key, hook in changed:
            hooks[key] = hook


def _nothing() -> None:
    """Other ranks have something to check."""


class _Cast:
    """A forward pre-hook."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast(args, self._dtype), _cast(kwargs, self._dtype)


class _CastOutput:
    """A forward hook."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self._dtype)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values

    def one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(one, values)
