"""Refusals before training starts: each names its culprit and a way out."""

import math
import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import LBFGS, Optimizer

from lsg.errors import ConfigurationError
from lsg.model.batch_norm_watch import has_statistics

_REPLACES_WEIGHTS = (WeightNorm, SpectralNorm, BasePruningMethod)  # hooks of torch.nn.utils
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_NO_RULE = (nn.RNNBase, nn.RNNCellBase, nn.AdaptiveLogSoftmaxWithLoss)


def problems(model: nn.Module, trained: Iterable[nn.Parameter]) -> list[str]:
    """Everything about a model that forbids private training, one sentence each."""
    trained_ids = {id(p) for p in trained}
    found = []
    for name, module in model.named_modules():
        label = f"module '{name or 'model'}' ({type(module).__name__})"
        own = [p for p in module.parameters(recurse=False) if id(p) in trained_ids]
        if isinstance(module, torch.jit.ScriptModule):
            found.append(f"{label} is compiled by TorchScript, which has no place for rules; give the Python module")
        elif isinstance(module, _BatchNorm):
            # One that trains nothing is taken to be meant for evaluation mode, and refused if it runs in another.
            if not has_statistics(module) or (own and module.training):
                found.append(f"{label} mixes the samples of a batch; lsg.fix(model) turns it into GroupNorm")
        elif isinstance(module, _InstanceNorm) and module.track_running_stats:
            found.append(f"{label} keeps running statistics of the data; lsg.fix(model) turns them off")
        elif isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            attention = module if isinstance(module, nn.MultiheadAttention) else module.self_attn
            if not attention.batch_first:
                found.append(f"{label} does not have the batch first; make it with batch_first=True")
        elif isinstance(module, _TABLES) and module.max_norm is not None:
            found.append(f"{label} uses max_norm, which rewrites the rows that a batch looks up; turn it off")
        elif isinstance(module, _TABLES) and own and module.scale_grad_by_freq:
            found.append(f"{label} uses scale_grad_by_freq, which mixes the samples of a batch; turn it off")
        elif isinstance(module, nn.EmbeddingBag) and own and module.sparse:
            found.append(f"{label} uses sparse=True, but noise makes every row's gradient dense; turn it off")
        elif isinstance(module, _NO_RULE) and own:
            way = "lsg.fix(model) replaces it" if type(module) in (nn.RNN, nn.LSTM, nn.GRU) else "replace it"
            found.append(f"{label} has no per-sample rule; freeze its parameters, or {way}")
        elif hasattr(module, "parametrizations") and any(True for _ in module.parametrizations.parameters()):
            found.append(f"{label} is parametrized, which has no per-sample rule; remove the parametrization")
        elif own and any(isinstance(hook, _REPLACES_WEIGHTS) for hook in module._forward_pre_hooks.values()):
            names = ", ".join(f"'{name}'" for name, _ in module.named_parameters(recurse=False))
            found.append(
                f"{label} computes its weight anew at each forward from {names} (weight_norm, spectral_norm or prune), "
                "which has no per-sample rule; remove that"
            )
        if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
            found.append(f"{label} is lazy and not yet initialised; run one forward pass before make_private")
    return found


def check_model(model: nn.Module, trained: list[nn.Parameter]) -> None:
    found = problems(model, trained)
    if found:
        raise ConfigurationError("this model cannot be trained privately: " + "; ".join(found))
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter in trained:
        if not parameter.is_floating_point():
            raise ConfigurationError(f"parameter '{names[id(parameter)]}' is {parameter.dtype}, not a real number")
    if not trained:
        raise ConfigurationError("no parameter of the model requires a gradient: there is nothing to train")
    devices = {p.device for p in trained}
    if len(devices) > 1:
        raise ConfigurationError(f"trained parameters live on several devices ({', '.join(map(str, devices))})")


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that the optimizer will update, checked against the model's."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"module is a {type(model).__name__}; it must be a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError("optimizer LBFGS needs closures, which see a batch many times; use SGD or Adam, say")
    known = {id(p) for p in model.parameters()}
    listed = _listed(optimizer)
    for number, parameter in enumerate(listed):
        if id(parameter) not in known:
            raise ConfigurationError(
                f"the optimizer's parameter number {number}, of shape {tuple(parameter.shape)}, is not a parameter of "
                "the model: make the optimizer from model.parameters() after the model is final"
            )
    in_optimizer = {id(p) for p in listed}
    return [p for p in model.parameters() if p.requires_grad and id(p) in in_optimizer]


def warn_of_hooks(model: nn.Module, trained: list[nn.Parameter]) -> None:
    """Tell of hooks that see gradients: what they do to them is not known."""
    modules = [
        f"module '{name or 'model'}' ({type(module).__name__})"
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    if modules:
        warnings.warn(
            f"{modules[0]}{_and_more(modules)} has a backward hook, which sees the gradients of a whole batch. If it "
            "changes them by anything computed over the batch, clipping does not bound a record's influence: remove it",
            stacklevel=7,
        )
    ids = {id(p) for p in trained}
    parameters = [
        name
        for name, p in model.named_parameters()
        if id(p) in ids and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))
    ]
    if parameters:
        warnings.warn(
            f"parameter '{parameters[0]}'{_and_more(parameters)} has a gradient hook, which will not run: private "
            "training computes per-sample gradients beside the parameter. Remove it, or change gradients in a step "
            "hook of the optimizer (register_step_pre_hook), which sees the private ones",
            stacklevel=7,
        )


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _listed(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def warn_of_others(model: nn.Module, optimizer: Optimizer) -> None:
    """Tell of parameters that get gradients without clipping and noise, as the optimizer does not have them."""
    in_optimizer = {id(p) for p in _listed(optimizer)}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in in_optimizer]
    if others:
        warnings.warn(
            f"parameter '{others[0]}'{_and_more(others)} requires a gradient but is not in the optimizer: it stays "
            "as it is, and its gradient is not private. Freeze it, which is faster, too, and never give it to another "
            "optimizer",
            stacklevel=7,
        )


def untrained_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Those that the optimizer has and that are frozen."""
    in_optimizer = {id(p) for p in _listed(optimizer)}
    return {name: p for name, p in model.named_parameters() if not p.requires_grad and id(p) in in_optimizer}


def check_budget(epsilon: float, delta: float, records: int) -> None:
    if not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise ConfigurationError(f"target_epsilon={epsilon!r} must be positive and finite")
    check_delta(delta, records)


def check_delta(delta: float, records: int) -> None:
    if not isinstance(delta, int | float) or not 0 < delta < 1:
        raise ConfigurationError(f"delta={delta!r} must lie between 0 and 1")
    if delta >= 1 / records:
        warnings.warn(
            f"delta={delta:g} is not smaller than 1/N = {1 / records:g}: it allows publishing a record outright",
            stacklevel=3,
        )


def check_noise(noise_multiplier: float) -> None:
    if not isinstance(noise_multiplier, int | float) or not 0 <= noise_multiplier < math.inf:
        raise ConfigurationError(f"noise_multiplier={noise_multiplier!r} must be 0 or more, and finite")
