"""Make a model fit for private training: a model with BatchNorm or RNNs in, a copy with GroupNorm and other RNNs out.

BatchNorm makes each sample's activations depend on the other samples of its batch, so no sample has a gradient of
its own to clip. GroupNorm normalises each sample by itself. PyTorch's RNNs compute all steps in one operation that no
rule sees into; Opacus's compute the same of linear layers, step by step.
"""

import copy
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from lsg.errors import ConfigurationError

MOST_GROUPS = 32  # the default of the GroupNorm paper (Wu and He, 2018)
FEWEST_CHANNELS_1D = 16
_RECURRENT: dict[type, str] = {nn.RNN: "DPRNN", nn.LSTM: "DPLSTM", nn.GRU: "DPGRU"}
_SIZES = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size")
_REPLACEABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def fix(model: nn.Module) -> nn.Module:
    """A deep copy of `model` without layers that mix samples or keep statistics of the data.

    In: any module; it is not changed. Out: a copy in which every BatchNorm is a GroupNorm with the same channels,
    eps, weight, bias, dtype, device and training flag, no InstanceNorm tracks running statistics, and every trained
    RNN, LSTM or GRU is Opacus's, with the same weights, for padded sequences, not packed ones. All other layers are
    copied as they are, and what was shared stays shared. Hooks on a replaced layer are dropped. With other norms
    the copy computes another function than the model: train it, and make its optimizer after the call. Refuses, by
    name, a BatchNorm it cannot replace.
    """
    for name, module in model.named_modules():
        _refuse_unknown(name, module)
    model = copy.deepcopy(model)
    # One replacement a module, however often it is used.
    replaced: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        if isinstance(module, _BatchNorm):
            replaced[module] = _group_norm(module)
        elif isinstance(module, nn.RNNBase) and type(module) in _RECURRENT and _is_trained(module):
            replaced[module] = _step_by_step(module)
        elif isinstance(module, _InstanceNorm) and module.track_running_stats:
            _forget_running_stats(module)
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children() would hide a second use of one child
            if child in replaced:
                parent._modules[name] = replaced[child]
    return replaced.get(model, model)


def _refuse_unknown(name: str, module: nn.Module) -> None:
    """Raise if `module` is a kind of BatchNorm whose behaviour a plain GroupNorm would not keep."""
    if not isinstance(module, _BatchNorm) or type(module) in _REPLACEABLE:
        return
    kind = type(module).__name__
    where = f"layer {name!r}" if name else "the model"
    if isinstance(module, LazyModuleMixin):
        why = "does not know its number of channels yet; run one forward pass through the model first"
    else:
        why = "is a subclass of BatchNorm and may do more than normalise; replace it by hand, with nn.GroupNorm"
    raise ConfigurationError(f"fix() cannot replace {where}: {kind} {why}")


def _group_norm(old: _BatchNorm) -> nn.GroupNorm:
    """The GroupNorm that takes the place, and the very parameters, of the BatchNorm `old`."""
    channels = old.num_features
    # BatchNorm1d may see (batch, channels), where a group of one channel is always normalised to zero.
    most = max(1, channels // FEWEST_CHANNELS_1D) if isinstance(old, nn.BatchNorm1d) else channels
    groups = max(g for g in range(1, min(MOST_GROUPS, most) + 1) if channels % g == 0)
    new = nn.GroupNorm(groups, channels, eps=old.eps, affine=False)
    # Taking over the objects keeps values, dtype, device, requires_grad, tied parameters and a missing bias.
    new.affine, new.weight, new.bias = old.affine, old.weight, old.bias
    return new.train(old.training)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _step_by_step(old: nn.RNNBase) -> nn.Module:
    """Opacus's RNN of the same kind, with the weights of `old`."""
    from opacus import layers

    options: dict[str, Any] = {name: getattr(old, name) for name in _SIZES}
    if isinstance(old, nn.RNN):
        options["nonlinearity"] = old.nonlinearity
    new: nn.Module = getattr(layers, _RECURRENT[type(old)])(**options)
    own = dict(old.named_parameters())
    weight = next(iter(own.values()))
    new.to(weight.device, weight.dtype).load_state_dict(old.state_dict())
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(own[name].requires_grad)
    return new.train(old.training)


def _forget_running_stats(norm: _InstanceNorm) -> None:
    """Make `norm` use each sample's own statistics in evaluation too, and drop those it gathered from data."""
    norm.track_running_stats = False
    norm.running_mean = norm.running_var = norm.num_batches_tracked = None
