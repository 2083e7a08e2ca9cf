"""Opacus's names on lsg: for programs written for Opacus, change the import and nothing else.

    from lsg.integrations.opacus import BatchMemoryManager, ModuleValidator, PrivacyEngine, get_noise_multiplier

docs/from-opacus.md lists every public name and argument: the same, different and why, or absent.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lsg.accounting import calibrate_noise
from lsg.checkpoint import load_checkpoint, save_checkpoint
from lsg.engine import PrivacyEngine as Engine
from lsg.errors import ConfigurationError
from lsg.fix import fix
from lsg.layers.parameter_treatments import treat_parameters
from lsg.methods import LSG
from lsg.model.validation import problems
from lsg.sampling.loader import PrivateDataLoader

__all__ = ["BatchMemoryManager", "ModuleValidator", "PrivacyEngine", "get_noise_multiplier", "plain_state_dict"]
_PREFIX = "_module."  # of the keys in a state dict of Opacus's GradSampleModule


class PrivacyEngine(Engine):
    """lsg's engine with the methods that Opacus's has beside `make_private`."""

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module | None = None,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Model, optimizer and books in one file. module, optimizer: those that `make_private` returned."""
        self._check_own(module, optimizer)
        extra = dict(checkpoint_dict or {})
        for name, scheduler in _schedulers(noise_scheduler, grad_clip_scheduler):
            extra[name] = scheduler.state_dict()
        save_checkpoint(path, engine=self, extra=extra)

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module | None = None,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
    ) -> dict[str, Any]:
        """Continue that run bit by bit; returns `checkpoint_dict`. It does not read files that Opacus wrote."""
        self._check_own(module, optimizer)
        extra = load_checkpoint(path, engine=self)
        for name, scheduler in _schedulers(noise_scheduler, grad_clip_scheduler):
            scheduler.load_state_dict(extra.pop(name))
        return extra

    def get_privacy_spent(self, delta: float) -> tuple[float, float | None]:
        """(ε, None): Opacus's second number is the order of the RDP accountant, which is no part of the guarantee."""
        return self.get_epsilon(delta), None

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Whether the model can be trained privately as it is."""
        return ModuleValidator.is_valid(module)

    def _check_own(self, module: Any, optimizer: Any) -> None:
        run = self.run
        if module is not None and run.module not in (module, getattr(module, "module", None)):
            raise ConfigurationError("module is not the model that this engine's make_private returned")
        if optimizer is not None and optimizer is not run.optimizer:
            raise ConfigurationError("optimizer is not the one that this engine's make_private returned")


@contextmanager
def BatchMemoryManager(  # noqa: N802  (Opacus's name)
    *, data_loader: PrivateDataLoader, max_physical_batch_size: int, optimizer: Any = None
) -> Iterator[PrivateDataLoader]:
    """Within, the loader hands out micro-batches of so many rows at most. The optimizer knows by itself which of its
    steps are real."""
    if not isinstance(data_loader, PrivateDataLoader):
        raise ConfigurationError("BatchMemoryManager: data_loader must be the one that make_private returned")
    before = data_loader.logical.max_size
    data_loader.logical.limit(max_physical_batch_size)
    try:
        yield data_loader
    finally:
        data_loader.logical.limit(before)


class ModuleValidator:
    """What Opacus asks of a model before it is trained, asked of lsg."""

    @staticmethod
    def validate(module: nn.Module, *, strict: bool = False) -> list[ConfigurationError]:
        """What forbids private training. strict: raise the first of it."""
        trained = [p for p in module.parameters() if p.requires_grad]
        found = [ConfigurationError(problem) for problem in problems(module, trained)]
        if not found:
            try:
                treat_parameters(module, LSG())
            except ConfigurationError as error:
                found = [error]
        if strict and found:
            raise found[0]
        return found

    @staticmethod
    def is_valid(module: nn.Module) -> bool:
        return not ModuleValidator.validate(module)

    @staticmethod
    def fix(module: nn.Module) -> nn.Module:
        """A copy with GroupNorm in place of BatchNorm, and Opacus's RNNs."""
        return fix(module)

    @staticmethod
    def fix_and_validate(module: nn.Module) -> nn.Module:
        fixed = fix(module)
        ModuleValidator.validate(fixed, strict=True)
        return fixed


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "prv",
    epsilon_tolerance: float = 0.01,
) -> float:
    """The least noise with which so many steps, or epochs of 1 / sample_rate steps, stay within (ε, δ).

    epsilon_tolerance is accepted: lsg searches more closely than 0.01.
    """
    if (epochs is None) == (steps is None):
        raise ConfigurationError("get_noise_multiplier needs epochs or steps, and not both")
    if steps is None:
        assert epochs is not None
        steps = int(epochs / sample_rate)
    return calibrate_noise(
        accountant=accountant,
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=sample_rate,
        steps=steps,
    )


def plain_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of Opacus's wrapped model with the keys of the model itself, as lsg and everybody has them."""
    return {key.removeprefix(_PREFIX): value for key, value in state.items()}


def _schedulers(noise: Any, grad_clip: Any) -> list[tuple[str, Any]]:
    named = (("noise_scheduler_state_dict", noise), ("grad_clip_scheduler_state_dict", grad_clip))
    return [(name, scheduler) for name, scheduler in named if scheduler is not None]
