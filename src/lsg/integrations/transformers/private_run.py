"""One private run of a Trainer: privacy arguments and steps in; an engine on model, optimizer and loader out."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from lsg.accounting import calibrate_noise
from lsg.accounting.phases import Phase
from lsg.engine import PrivacyEngine
from lsg.errors import ConfigurationError
from lsg.integrations.transformers.arguments import PrivacyArguments
from lsg.integrations.transformers.batches import Batches
from lsg.methods import NonPrivate
from lsg.model.validation import check_budget
from lsg.sampling.loader import PrivateDataLoader
from lsg.step.optimizer import PrivateOptimizer


class PrivateRun:
    """steps: all logical steps of the run, for which the noise is calibrated."""

    def __init__(
        self,
        privacy: PrivacyArguments,
        units: list[Any] | None,
        delta: float,
        steps: int,
        args: Any,
        batches: Batches,
    ) -> None:
        self._privacy, self._units, self._delta, self._steps = privacy, units, delta, steps
        self.max_grad_norm = args.max_grad_norm if privacy.max_grad_norm is None else privacy.max_grad_norm
        self.batches = batches
        self.engine = PrivacyEngine(
            accountant=privacy.accountant, secure_mode=privacy.secure_mode, ledger=privacy.ledger
        )
        self.optimizer: PrivateOptimizer
        self.loader: PrivateDataLoader

    def attach(self, model: nn.Module, optimizer: Optimizer) -> PrivateDataLoader:
        planned = self._planned()
        _, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=self.batches.loader,
            noise_multiplier=planned.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            method=self._privacy.method,
            max_physical_batch_size=self.batches.most * self._privacy.views,
            clipping=self._privacy.clipping,
            noise_generator=self._privacy.noise_generator,
            perf=self._privacy.perf,
            views=self._privacy.views,
            unit_of=self._units,
            max_records_per_unit=self._privacy.max_records_per_unit,
        )
        if self._privacy.target_epsilon is not None:
            self.engine.keep_within(self._privacy.target_epsilon, self._delta, planned)
        return self.loader

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates, by name."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.engine.run.module.named_parameters() if id(p) in held and p.requires_grad}

    def close(self) -> None:
        """Give the model back as it was. What was spent stays in the engine's books."""
        self.engine.detach()

    def _planned(self) -> Phase:
        """All steps, with the noise that the arguments ask for."""
        plan, privacy = self.batches.plan, self._privacy
        rate = plan.sample_rate
        if privacy.noise_multiplier is not None:
            return Phase(privacy.noise_multiplier, rate, self._steps)
        assert privacy.target_epsilon is not None
        if isinstance(privacy.method, NonPrivate):
            raise ConfigurationError("NonPrivate has no epsilon: use PrivacyArguments(noise_multiplier=0)")
        check_budget(privacy.target_epsilon, self._delta, plan.records)
        noise = calibrate_noise(
            accountant=self.engine.accountant.mechanism(),
            target_epsilon=privacy.target_epsilon,
            target_delta=self._delta,
            sample_rate=rate,
            steps=self._steps,
        )
        return Phase(noise, rate, self._steps)
