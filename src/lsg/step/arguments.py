"""What `make_private` was given in, the same out, checked once: each refusal names its culprit and a way out."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lsg.distributed.group import Group
from lsg.distributed.launch import launched
from lsg.distributed.sharded_model import check_sharding, reshard, sharded_modules
from lsg.distributed.wrapper import unwrapped
from lsg.errors import ConfigurationError
from lsg.files.plain_numbers import plain
from lsg.layers.install import is_private
from lsg.methods import Clipping, Method, NonPrivate
from lsg.model.opacus import check_opacus_arguments, refuse_opacus
from lsg.model.validation import (
    check_budget,
    check_model,
    check_noise,
    trained_parameters,
    warn_of_hooks,
    warn_of_others,
)
from lsg.perf import PerfConfig
from lsg.sampling.loader import sampling_plan
from lsg.sampling.plan import SamplingPlan
from lsg.sampling.units import Units, make_units
from lsg.step.clipping import Clipper
from lsg.step.gradients import LossReduction
from lsg.step.optimizer import PrivateOptimizer


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What the two forms of `make_private` have in common: all but the noise. `PrivacyEngine` explains each."""

    module: nn.Module
    optimizer: Optimizer
    data_loader: DataLoader[Any]
    max_grad_norm: float | list[float]
    method: Method
    max_physical_batch_size: int | None
    clipping: Clipping
    loss_reduction: LossReduction
    poisson_sampling: bool
    batch_first: bool
    noise_generator: torch.Generator | None
    perf: PerfConfig
    views: int = 1
    unit_of: Any = None
    max_records_per_unit: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckedArguments(Arguments):
    """Arguments that fit together, with Python's own numbers, and what was read off them.

    sampling: how the loader's records, or units of them, enter steps. units: which records are one unit. trained: the
    model's parameters that the optimizer updates. wrapper: what the user has; `module` is inside of it, or is it.
    group: the processes that train together.
    """

    wrapper: nn.Module
    group: Group
    sampling: SamplingPlan
    units: Units
    trained: list[nn.Parameter]
    clipper: Clipper


def check_arguments(function: str, given: Arguments, opacus: dict[str, Any]) -> CheckedArguments:
    """function: the name of the one that was called. opacus: its arguments that only Opacus knows."""
    group = Group.current()
    if group.alone and launched():
        warnings.warn(
            "this is one of several processes that a launcher started, but torch.distributed has no process group: "
            "each trains a model of its own. Call torch.distributed.init_process_group() before make_private",
            stacklevel=4,
        )
    return group.together(lambda: _checked(function, given, opacus, group))


def _checked(function: str, given: Arguments, opacus: dict[str, Any], group: Group) -> CheckedArguments:
    check_opacus_arguments(function, opacus)
    refuse_opacus(given.module, given.optimizer)
    wrapper = given.module
    given = replace(given, module=unwrapped(given.module))
    _check_settings(given)
    _check_unused(given)
    reshard(given.module)  # an evaluation may have left weights gathered
    given = _for_sharding(given, group)
    trained = trained_parameters(given.module, given.optimizer)
    warn_of_others(given.module, given.optimizer)
    sampling = sampling_plan(given.data_loader, poisson=given.poisson_sampling, ranks=group.size)
    units = make_units(
        sampling.records,
        views=plain(given.views),
        unit_of=given.unit_of,
        max_records_per_unit=plain(given.max_records_per_unit),
    )
    if units.named and isinstance(given.method, NonPrivate):
        raise ConfigurationError("unit_of: NonPrivate has no gradients of units: leave unit_of out")
    count = units.count(sampling.records)
    if units.named and sampling.batch_size > count:
        warnings.warn(
            f"batch_size={sampling.batch_size} counts units with unit_of, and there are {count}: each of them is in "
            "each step, at a sampling rate of 1, which costs the most epsilon a step. Give a smaller batch_size",
            stacklevel=3,
        )
    norm = plain(given.max_grad_norm)
    clipper = Clipper(given.clipping, tuple(norm) if isinstance(norm, list | tuple) else norm)
    if not isinstance(given.method, NonPrivate):
        check_model(given.module, trained)
        warn_of_hooks(given.module, trained)
    checked = vars(given) | {
        "max_grad_norm": norm,
        "max_physical_batch_size": plain(given.max_physical_batch_size),
        "wrapper": wrapper,
        "group": group,
        "sampling": replace(sampling, records=count),
        "units": units,
        "trained": trained,
        "clipper": clipper,
    }
    return CheckedArguments(**checked)


def _for_sharding(given: Arguments, group: Group) -> Arguments:
    """Of a sharded model: refuse what it cannot be trained with, and leave out what is chosen by default."""
    check_sharding(given.module, group)
    if not sharded_modules(given.module):
        return given
    if given.perf.compile or given.perf.cuda_graphs:
        raise ConfigurationError(
            f"{given.perf}: the model is sharded (fully_shard), and weights that come and go can be neither recorded "
            "nor compiled with rules: leave compile and cuda_graphs out"
        )
    if given.method.importance == "direct":
        raise ConfigurationError("importance='direct' looks for the largest of all weights, and the model is sharded")
    return replace(given, perf=replace(given.perf, compile=False, cuda_graphs=False, pad=False))


def checked_noise(noise_multiplier: float, method: Method) -> float:
    """The noise multiplier as Python's own number."""
    noise_multiplier = plain(noise_multiplier)
    check_noise(noise_multiplier)
    if isinstance(method, NonPrivate) and noise_multiplier:
        raise ConfigurationError(f"NonPrivate adds no noise: noise_multiplier={noise_multiplier} must be 0")
    return noise_multiplier


@dataclass(frozen=True)
class TargetArguments:
    """What `make_private_with_epsilon` is to keep within, as Python's own numbers."""

    epsilon: float
    delta: float
    epochs: int


def check_target(given: CheckedArguments, epsilon: float, delta: float, epochs: float) -> TargetArguments:
    if isinstance(given.method, NonPrivate):
        raise ConfigurationError("NonPrivate has no epsilon: use make_private(noise_multiplier=0)")
    epsilon, delta, epochs = plain(epsilon), plain(delta), plain(epochs)
    if not isinstance(epochs, int | float) or epochs < 1 or not float(epochs).is_integer():
        raise ConfigurationError(f"epochs={epochs!r} must be a whole number of at least 1")
    check_budget(epsilon, delta, given.sampling.records)
    return TargetArguments(epsilon, delta, int(epochs))


def _check_settings(given: Arguments) -> None:
    if not isinstance(given.method, Method):
        raise ConfigurationError(f"method={given.method!r} must be LSG, RGP, SparseDPSGD, DPSGD or NonPrivate")
    if not isinstance(given.perf, PerfConfig):
        raise ConfigurationError(f"perf={given.perf!r} must be a PerfConfig")
    if given.noise_generator is not None and not isinstance(given.noise_generator, torch.Generator):
        raise ConfigurationError(f"noise_generator={given.noise_generator!r} must be a torch.Generator")
    if not given.batch_first:
        raise ConfigurationError("batch_first=False: inputs must have the batch first")
    if given.loss_reduction not in ("mean", "sum"):
        raise ConfigurationError(f"loss_reduction={given.loss_reduction!r} must be 'mean' or 'sum'")


def _check_unused(given: Arguments) -> None:
    """Refuse a model or an optimizer that is private already."""
    if is_private(given.module):
        raise ConfigurationError(
            "module is attached to another PrivacyEngine: call that engine's detach() first (or make the model "
            "anew, if that engine is lost, as when a notebook's cell is run twice)"
        )
    if isinstance(given.optimizer, PrivateOptimizer):
        raise ConfigurationError("optimizer is private already: pass the original one")
