"""Checked arguments in; out a model, an optimizer and a loader that train together, each part of a run in its place."""

from dataclasses import dataclass
from typing import Any

from lsg.accounting import Accountant
from lsg.accounting.ledger import Ledger
from lsg.accounting.step_accounting import StepAccounting
from lsg.layers.plan import make_plan
from lsg.methods import NonPrivate
from lsg.model.guards import Guards
from lsg.model.non_private import PlainModel
from lsg.model.recorder import Recorder
from lsg.model.validation import untrained_parameters
from lsg.sampling.clock import Clock
from lsg.sampling.loader import PrivateDataLoader, known_lengths, sampling_generator
from lsg.sampling.plan import LogicalBatches
from lsg.sampling.secure_source import SecureNoise
from lsg.sampling.streams import Streams
from lsg.step.arguments import CheckedArguments
from lsg.step.gradients import PlainGradients, PrivateGradients
from lsg.step.optimizer import PrivateOptimizer
from lsg.step.run_state import RunState, describe


@dataclass(frozen=True)
class Attached:
    """What is on a model from `make_private` to `detach`. Training without privacy has no recorder and no guards, but
    a `plain` model in their place."""

    run: RunState
    loader: PrivateDataLoader
    recorder: Recorder | None
    guards: Guards | None
    plain: PlainModel | None

    @property
    def optimizer(self) -> PrivateOptimizer:
        return self.run.optimizer

    def detach(self) -> None:
        """Give the model back as it was, and end the optimizer's steps."""
        self.optimizer.close()
        for part in (self.recorder, self.plain):
            if part is not None:
                part.detach()
        if self.guards is not None:
            self.guards.remove()


def assemble(
    given: CheckedArguments,
    noise_multiplier: float,
    *,
    accountant: Accountant,
    ledger: Ledger | None,
    secure: SecureNoise | None,
) -> Attached:
    """secure: the cryptographic source of noise and samples, in secure mode."""
    streams = Streams(given.noise_generator, sampling_generator(given.data_loader), secure)
    sampler = LogicalBatches(
        given.sampling,
        streams.sampling(),
        given.max_physical_batch_size,
        known_lengths(given.data_loader.dataset),
        given.perf.max_tokens,
    )
    recorder, guards, plain = None, None, None
    gradients: PrivateGradients | PlainGradients
    if isinstance(given.method, NonPrivate):
        plain = PlainModel(given.module, given.trained, given.perf)
        gradients = _plain_gradients(given, plain)
        clock = Clock(gradients)
    else:
        gradients = _private_gradients(given, streams, by_tokens=sampler.max_tokens is not None)
        clock, recorder = Clock(gradients), gradients.recorder
        guards = Guards(recorder, clock, given.trained, given.loss_reduction)
    step_accounting = StepAccounting(accountant, given.sampling, ledger=ledger, replayable=sampler.source.replayable)
    optimizer = PrivateOptimizer(
        given.optimizer,
        gradients,
        clock,
        step_accounting,
        noise_multiplier=noise_multiplier,
        trained=given.trained,
        in_place=None if guards is None else guards.parameters,
    )
    settings = _settings(given, noise_multiplier, accountant)
    run = RunState(given.module, optimizer, sampler, clock, step_accounting, settings)
    loader = PrivateDataLoader(given.data_loader, sampler, clock, optimizer)
    return Attached(run, loader, recorder, guards, plain)


def _private_gradients(given: CheckedArguments, streams: Streams, *, by_tokens: bool) -> PrivateGradients:
    """Puts the rules on the model. by_tokens: micro-batches are limited by their tokens, so that no size is fixed."""
    treatments = make_plan(given.module, given.method, given.trained)
    if given.clipping == "per_layer":
        given.clipper.thresholds(sum(t.kind != "frozen" for t in treatments.treatments))
    device = given.trained[0].device
    recorder = Recorder(
        given.module,
        treatments,
        given.method,
        streams.projection(device),
        given.perf,
        None if by_tokens else given.max_physical_batch_size,
        untrained_parameters(given.module, given.optimizer),
        given.loss_reduction,
    )
    return PrivateGradients(
        recorder,
        given.clipper,
        loss_reduction=given.loss_reduction,
        expected_batch_size=given.sampling.expected_batch_size,
        noise=streams.noise(device),
    )


def _plain_gradients(given: CheckedArguments, plain: PlainModel) -> PlainGradients:
    return PlainGradients(
        given.trained,
        plain.size,
        loss_reduction=given.loss_reduction,
        expected_batch_size=given.sampling.expected_batch_size,
    )


def _settings(given: CheckedArguments, noise_multiplier: float, accountant: Accountant) -> dict[str, Any]:
    """What a continuation of the run must be made with, too, by the names that users know."""
    return {
        "records": given.sampling.records,
        "batch_size": given.sampling.batch_size,
        "poisson_sampling": given.sampling.poisson,
        "max_physical_batch_size": given.max_physical_batch_size,
        "max_tokens": given.perf.max_tokens,
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": given.max_grad_norm,
        "clipping": given.clipping,
        "loss_reduction": given.loss_reduction,
        "method": describe(given.method),
        "accountant": accountant.name,
    }
