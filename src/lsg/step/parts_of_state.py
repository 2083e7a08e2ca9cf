"""The states of a model and its optimizer, apart: named tensors, and plain values that say what belongs where.

Sharded tensors stay so. Plain states of one process, as its checkpoint holds them, become the same parts: so a run may
go on with its weights sharded or not, on any number of ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lsg.distributed.sharding import is_sharded, own, own_rows, sharded_like
from lsg.errors import ConfigurationError

Fill = Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Parts:
    """tensors: of weights and of the optimizer, by name. rest: numbers, strings, lists and dicts."""

    tensors: dict[str, Tensor]
    rest: dict[str, Any]


def take_apart(module: nn.Module, optimizer: Optimizer) -> Parts:
    """What is there now. Nothing is copied."""
    own_names = _names(module, optimizer)
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return _parts(
        module.state_dict(),
        type(optimizer).__qualname__,
        [{**group, "params": [own_names[id(p)] for p in group["params"]]} for group in optimizer.param_groups],
        {own_names[key]: optimizer.state.get(p, {}) for key, p in parameters.items()},
        {own_names[key]: p for key, p in parameters.items()},
    )


def parts_of(state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> Parts:
    """state: model, optimizer and optimizer_class of the checkpoint of one process."""
    own_names = _names(module, optimizer)
    names = [own_names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    saved = state["optimizer"]
    if sum(len(group["params"]) for group in saved["param_groups"]) != len(names):
        raise ConfigurationError("the optimizer's parameter groups differ from those in the file")
    return _parts(
        state["model"],
        state["optimizer_class"],
        [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]],
        {names[number]: values for number, values in saved["state"].items()},
        {},
    )


def _parts(
    model: Mapping[str, Any],
    kind: str,
    groups: list[dict[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, Tensor],
) -> Parts:
    tensors = {f"model/{name}": value for name, value in model.items() if isinstance(value, Tensor)}
    for name, state in states.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if is_sharded(value) and value.shape != parameters[name].shape:
                raise ConfigurationError(
                    f"the optimizer's '{key}' of '{name}' is sharded in another shape than its weight: such a state "
                    "cannot be saved for another number of processes"
                )
            tensors[f"optimizer/{name}/{key}"] = value
    rest = {
        "kind": kind,
        "groups": groups,
        "shapes": {name: [list(value.shape), str(value.dtype)] for name, value in tensors.items()},
        "model": {name: value for name, value in model.items() if not isinstance(value, Tensor)},
        "state": {
            name: {key: "tensor" if isinstance(value, Tensor) else [value] for key, value in state.items()}
            for name, state in states.items()
        },
    }
    return Parts(tensors, rest)


def check_parts(rest: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse, by name, what does not fit."""
    mine = take_apart(module, optimizer).rest
    if rest["kind"] != mine["kind"]:
        raise ConfigurationError(f"the optimizer is {rest['kind']} in the file, but {mine['kind']} here")
    saved, here = ({k: v for k, v in each["shapes"].items() if k.startswith("model/")} for each in (rest, mine))
    for name in sorted({*saved, *here}):
        found, wanted = saved.get(name), here.get(name)
        if found != wanted:
            label = name.removeprefix("model/")
            if found is None or wanted is None:
                raise ConfigurationError(f"'{label}' is in {'the model' if found is None else 'the file'} only")
            raise ConfigurationError(
                f"'{label}' is {found[1]} {found[0]} in the file, but {wanted[1]} {wanted[0]} in the model"
            )
    if [group["params"] for group in rest["groups"]] != [group["params"] for group in mine["groups"]]:
        raise ConfigurationError("the optimizer's parameter groups differ from those in the file")


@torch.no_grad()
def put_back(rest: Mapping[str, Any], fill: Fill, module: nn.Module, optimizer: Optimizer) -> None:
    """fill: fills named tensors with what was saved of them."""
    own_names = _names(module, optimizer)
    parameters = {own_names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    model = module.state_dict()
    targets = {f"model/{name}": value for name, value in model.items() if isinstance(value, Tensor)}
    for name, state in rest["state"].items():
        for key, value in state.items():
            if value == "tensor":
                path = f"optimizer/{name}/{key}"
                targets[path] = _like(parameters[name], *rest["shapes"][path])
    fill(targets)
    others = {name: value for name, value in rest["model"].items() if name in model}
    if others:  # what modules keep beside tensors
        module.load_state_dict({**model, **others})
    for group, saved in zip(optimizer.param_groups, rest["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    optimizer.state.clear()
    for name, state in rest["state"].items():
        if state:
            optimizer.state[parameters[name]] = {
                key: targets[f"optimizer/{name}/{key}"] if value == "tensor" else value[0]
                for key, value in state.items()
            }


def fill_from(tensors: Mapping[str, Tensor]) -> Fill:
    """From whole tensors: of a sharded one this rank's rows."""

    def fill(targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            whole = tensors[name]
            own(target).copy_(whole[own_rows(target)] if is_sharded(target) else whole)

    return fill


def _like(parameter: Tensor, shape: list[int], dtype: str) -> Tensor:
    """Memory for a saved state of this parameter: sharded as it is, where it has its shape; a number on the CPU."""
    kind = getattr(torch, dtype.removeprefix("torch."))
    if list(parameter.shape) == shape:
        return sharded_like(parameter, torch.empty_like(own(parameter), dtype=kind))
    return torch.empty(shape, dtype=kind, device="cpu" if not shape else own(parameter).device)


def _names(module: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    names = {id(p): name for name, p in module.named_parameters()}
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ConfigurationError(f"the optimizer's parameter number {number} is not in the model")
    return names
