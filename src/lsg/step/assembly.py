"""Checked arguments in; out a model, an optimizer and a loader that train together, each part of a run in its place."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lsg.accounting import Accountant
from lsg.accounting.ledger import Ledger
from lsg.accounting.step_accounting import StepAccounting
from lsg.distributed.sharded_model import ShardedModel, sharded_modules
from lsg.distributed.sharding import compute_device, is_sharded
from lsg.distributed.wrapper import keep_out, let_in
from lsg.layers.parameter_treatments import treat_parameters
from lsg.methods import NonPrivate
from lsg.model.attachment import Attachment
from lsg.model.guards import Guards
from lsg.model.non_private import NonPrivateModel
from lsg.model.recorder import Recorder
from lsg.model.validation import untrained_parameters
from lsg.sampling.clock import Clock
from lsg.sampling.loader import PrivateDataLoader, known_lengths, sampling_generator
from lsg.sampling.poisson_batches import LogicalBatches
from lsg.sampling.same_records import check_same_records
from lsg.sampling.secure_source import SecureNoise
from lsg.sampling.streams import Streams
from lsg.speed.fast_forward import FastForward
from lsg.step.arguments import CheckedArguments
from lsg.step.gradients import PrivateGradients
from lsg.step.non_private_gradients import NonPrivateGradients
from lsg.step.optimizer import PrivateOptimizer
from lsg.step.replicas import Replicas, settings_of
from lsg.step.run_state import RunState, describe


@dataclass(frozen=True)
class Attached:
    """What is on a model from `make_private` to `detach`. Training without privacy has no attachment and no
    guards, but a `non_private` model in their place. wrapper: what the user has of the model."""

    run: RunState
    wrapper: nn.Module
    loader: PrivateDataLoader
    attachment: Attachment | None
    guards: Guards | None
    non_private: NonPrivateModel | None

    @property
    def optimizer(self) -> PrivateOptimizer:
        return self.run.optimizer

    @property
    def fast(self) -> FastForward | None:
        """The model's forward, compiled or recorded, where it is."""
        owner = self.attachment or self.non_private
        return None if owner is None else owner.fast

    def detach(self) -> None:
        """Give the model back as it was, and end the optimizer's steps."""
        self.optimizer.close()
        for part in (self.attachment, self.non_private):
            if part is not None:
                part.detach()
        if self.guards is not None:
            self.guards.remove()
        let_in(self.wrapper)


def assemble(
    given: CheckedArguments,
    noise_multiplier: float,
    *,
    accountant: Accountant,
    ledger: Ledger | None,
    secure: SecureNoise | None,
) -> Attached:
    """secure: the cryptographic source of noise and samples, in secure mode."""
    settings = _settings(given, noise_multiplier, accountant)
    engine = {"PrivacyEngine's secure_mode": secure is not None, "PrivacyEngine's ledger": ledger and "given"}
    _start_alike(given, settings, engine)
    sharded = ShardedModel(given.module, given.group) if sharded_modules(given.module) else None
    streams = Streams(given.noise_generator, sampling_generator(given.data_loader), secure, given.group)
    sampler = LogicalBatches(
        given.sampling,
        streams.sampling(),
        given.max_physical_batch_size,
        known_lengths(given.data_loader.dataset),
        given.perf.max_tokens,
        given.units,
        given.group,
        in_step=sharded is not None,
    )
    attachment, guards, non_private = None, None, None
    gradients: PrivateGradients | NonPrivateGradients
    if isinstance(given.method, NonPrivate):
        non_private = NonPrivateModel(given.module, given.trained, given.perf)
        gradients = _non_private_gradients(given, non_private)
        if sharded is not None:
            non_private.scale_before_average(sharded, gradients)
        clock = Clock(gradients)
    else:
        attachment = _attachment(given, streams, sharded, by_tokens=sampler.max_tokens is not None)
        gradients = _private_gradients(given, streams, attachment.recorder)
        clock = Clock(gradients)
        guards = Guards(attachment, clock, given.trained, given.loss_reduction, sharded)
    step_accounting = StepAccounting(
        accountant, given.sampling, ledger=ledger, replayable=sampler.source.replayable, group=given.group
    )
    optimizer = PrivateOptimizer(
        given.optimizer,
        gradients,
        clock,
        step_accounting,
        noise_multiplier=noise_multiplier,
        trained=given.trained,
        in_place=None if guards is None else guards.parameters,
        replicas=Replicas(given.group, _replicated(given, gradients), _stream_states(sampler, gradients)),
        group=given.group,
        sharded=sharded,
    )
    run = RunState(given.module, optimizer, sampler, clock, step_accounting, settings, given.group)
    loader = PrivateDataLoader(given.data_loader, sampler, clock, optimizer)
    keep_out(given.wrapper)
    return Attached(run, given.wrapper, loader, attachment, guards, non_private)


def _attachment(
    given: CheckedArguments, streams: Streams, sharded: ShardedModel | None, *, by_tokens: bool
) -> Attachment:
    """Puts the rules on the model. by_tokens: micro-batches are limited by their tokens, so that no size is fixed."""
    treatments = treat_parameters(given.module, given.method, given.trained)
    if given.clipping == "per_layer":
        given.clipper.thresholds(sum(t.kind != "frozen" for t in treatments.parameters))
    recorder = Recorder(
        treatments.parameters,
        given.method,
        streams.projection(compute_device(given.trained[0])),
        given.perf,
        None if by_tokens else given.max_physical_batch_size,
        untrained_parameters(given.module, given.optimizer),
        sharded,
    )
    return Attachment(given.module, treatments, recorder, given.perf, given.loss_reduction, sharded)


def _private_gradients(given: CheckedArguments, streams: Streams, recorder: Recorder) -> PrivateGradients:
    return PrivateGradients(
        recorder,
        given.clipper,
        loss_reduction=given.loss_reduction,
        expected_batch_size=given.sampling.expected_batch_size,
        noise=streams.noise(compute_device(given.trained[0])),
        views=given.units.views,
        named_units=given.units.named,
        group=given.group,
    )


def _non_private_gradients(given: CheckedArguments, model: NonPrivateModel) -> NonPrivateGradients:
    return NonPrivateGradients(
        given.trained,
        model.size,
        loss_reduction=given.loss_reduction,
        expected_batch_size=given.sampling.expected_batch_size,
        views=given.units.views,
        group=given.group,
    )


def _trained_names(given: CheckedArguments) -> dict[str, nn.Parameter]:
    trained = {id(parameter) for parameter in given.trained}
    return {name: p for name, p in given.module.named_parameters() if id(p) in trained}


def _replicated(
    given: CheckedArguments, gradients: PrivateGradients | NonPrivateGradients
) -> Callable[[], dict[str, Tensor]]:
    """How to read what all ranks must have alike: weights, and where they are sharded the factors of subspaces."""
    weights = {f"weight '{name}'": p for name, p in given.module.named_parameters() if not is_sharded(p)}
    recorder = gradients.recorder if isinstance(gradients, PrivateGradients) else None
    if recorder is None or not any(is_sharded(p) for p in given.trained):
        return lambda: dict(weights)
    return lambda: weights | recorder.shared_factors()


def _stream_states(
    sampler: LogicalBatches, gradients: PrivateGradients | NonPrivateGradients
) -> dict[str, Callable[[], Tensor | None]]:
    """How to read the state of each random stream that all ranks share."""
    streams: dict[str, Callable[[], Tensor | None]] = {"sampling": sampler.source.state}
    if isinstance(gradients, PrivateGradients):
        streams |= {
            "noise": lambda: gradients.noise.state(),
            "projection": lambda: gradients.recorder.state_dict()["generator"],
        }
    return streams


def _start_alike(given: CheckedArguments, settings: dict[str, Any], engine: dict[str, Any]) -> None:
    """Several ranks: refuse, by name, arguments and data that differ; then all have rank 0's weights."""
    if given.group.alone:
        return
    lengths = known_lengths(given.data_loader.dataset)
    shapes = {f"the shape of '{name}'": tuple(p.shape) for name, p in given.module.named_parameters()}
    trained = {f"whether '{name}' is trained": True for name in _trained_names(given)}
    given.group.check_alike(
        {
            **engine,
            **{f"make_private's {name}": value for name, value in settings.items()},
            "the optimizer": type(given.optimizer).__qualname__,
            "the optimizer's settings": settings_of(given.optimizer),
            "what the data set tells of its records' lengths": None if lengths is None else _digest(lengths),
            **shapes,
            **trained,
        },
        "Every rank must run the same script on the same data",
    )
    check_same_records(given.data_loader.dataset, given.group)
    with torch.no_grad():
        for tensor in [*given.module.parameters(), *given.module.buffers()]:
            if not is_sharded(tensor):
                given.group.from_first(tensor)


def _digest(numbers: Tensor) -> str:
    values = numbers.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]


def _settings(given: CheckedArguments, noise_multiplier: float, accountant: Accountant) -> dict[str, Any]:
    """What a continuation of the run must be made with, too, by the names that users know."""
    units = {
        "views": None if given.units.views == 1 else given.units.views,
        "unit_of": given.units.fingerprint(),
        "max_records_per_unit": given.units.max_records,
    }
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
        # Only what is set: runs that were saved before there were units go on.
        **{name: value for name, value in units.items() if value is not None},
    }
