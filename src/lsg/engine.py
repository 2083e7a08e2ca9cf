"""`PrivacyEngine`: puts plan, rules, sampling, clipping, noise and accounting together behind Opacus's API."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lsg.accounting import Accountant, calibrate_noise, create_accountant
from lsg.accounting.ledger import Ledger
from lsg.accounting.phases import Phase
from lsg.accounting.step_accounting import Target
from lsg.errors import ConfigurationError, PrivacyError
from lsg.fix import fix
from lsg.layers.parameter_treatments import treat_parameters
from lsg.methods import LSG, Clipping, Method
from lsg.model.recorder import Recorder
from lsg.model.validation import check_delta, problems
from lsg.perf import PerfConfig
from lsg.sampling.loader import PrivateDataLoader
from lsg.sampling.plan import SamplingPlan
from lsg.sampling.secure_source import SecureNoise
from lsg.step.arguments import (
    Arguments,
    CheckedArguments,
    TargetArguments,
    check_arguments,
    check_target,
    checked_noise,
)
from lsg.step.assembly import Attached, assemble
from lsg.step.gradients import LossReduction
from lsg.step.optimizer import PrivateOptimizer
from lsg.step.run_state import RunState
from lsg.subspace import Subspace

_NOT_ATTACHED = "this engine is not attached to a model: call make_private first"


class PrivacyEngine:
    """Makes a model, an optimizer and a loader train with differential privacy, and keeps the books.

    accountant: "prv" (as the paper), "pld" or "rdp". Neighbouring data sets differ in one record (add or remove).
    ledger: a file where each step is written down before its noise is drawn, so that a crash hides none.
    secure_mode: noise and samples from a cryptographic generator, as in Opacus; needs `pip install 'lsg-dp[secure]'`.
        Nothing of it can be repeated: steps lost in a crash are charged.
    """

    def __init__(
        self,
        *,
        accountant: str = "prv",
        secure_mode: bool = False,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        self._accountant = create_accountant(accountant)
        self._secure = SecureNoise() if secure_mode else None
        self._ledger = None if ledger is None else Ledger(ledger)
        self._attached: Attached | None = None
        self._sampling: SamplingPlan | None = None  # of the model attached last

    @property
    def accountant(self) -> Accountant:
        """The books: `history` and `state_dict()` as in Opacus."""
        return self._accountant

    @accountant.setter
    def accountant(self, accountant: Any) -> None:
        raise ConfigurationError(
            "engine.accountant cannot be replaced, or steps would miss its books: name it when you make the engine, "
            "PrivacyEngine(accountant='rdp'), and give it earlier steps by engine.accountant.load_state_dict()"
        )

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        method: Method | None = None,
        max_physical_batch_size: int | None = None,
        clipping: Clipping = "flat",
        loss_reduction: LossReduction = "mean",
        poisson_sampling: bool = True,
        batch_first: bool = True,
        noise_generator: torch.Generator | None = None,
        perf: PerfConfig | None = None,
        views: int = 1,
        unit_of: Any = None,
        max_records_per_unit: int | None = None,
        **opacus: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        """As `make_private`, with the least noise that keeps `epochs` epochs within (target_epsilon, target_delta).

        The optimizer raises BudgetExceeded instead of a step that would pass the target.
        """
        self._check_unspent()
        self._check_unattached()
        given = check_arguments(
            "make_private_with_epsilon",
            Arguments(
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                max_grad_norm=max_grad_norm,
                method=LSG() if method is None else method,
                max_physical_batch_size=max_physical_batch_size,
                clipping=clipping,
                loss_reduction=loss_reduction,
                poisson_sampling=poisson_sampling,
                batch_first=batch_first,
                noise_generator=noise_generator,
                perf=perf or PerfConfig(),
                views=views,
                unit_of=unit_of,
                max_records_per_unit=max_records_per_unit,
            ),
            opacus,
        )
        target = given.group.together(lambda: check_target(given, target_epsilon, target_delta, epochs))
        planned = self._calibrated(given.sampling, target)
        private = self._attach(given, planned.noise_multiplier)
        self.keep_within(target.epsilon, target.delta, planned)
        return private

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        method: Method | None = None,
        max_physical_batch_size: int | None = None,
        clipping: Clipping = "flat",
        loss_reduction: LossReduction = "mean",
        poisson_sampling: bool = True,
        batch_first: bool = True,
        noise_generator: torch.Generator | None = None,
        perf: PerfConfig | None = None,
        views: int = 1,
        unit_of: Any = None,
        max_records_per_unit: int | None = None,
        **opacus: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        """Returns the same model, now recording per-sample gradients; a private optimizer; a Poisson loader.

        noise_multiplier: standard deviation of the noise over `max_grad_norm`; 0 is allowed, epsilon is then infinite.
        perf: settings for speed; none changes a guarantee.
        loss_reduction: whether the loss given to `backward` is the mean or the sum over the micro-batch.
        noise_generator: makes a run repeatable; without it all randomness comes from the operating system.
        views: rows that the model gets for each record, adjacent; they are averaged before the clip.
        unit_of: one id for each record. All records of an id are one unit: drawn together (`batch_size` counts units)
            and averaged before the clip; epsilon is about adding or removing a unit.
        max_records_per_unit: the most records of a unit in a step, chosen anew for each.
        opacus: what Opacus takes beside these (`grad_sample_mode`, say), where it changes nothing here.
        """
        self._check_unattached()
        given = check_arguments(
            "make_private",
            Arguments(
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                max_grad_norm=max_grad_norm,
                method=LSG() if method is None else method,
                max_physical_batch_size=max_physical_batch_size,
                clipping=clipping,
                loss_reduction=loss_reduction,
                poisson_sampling=poisson_sampling,
                batch_first=batch_first,
                noise_generator=noise_generator,
                perf=perf or PerfConfig(),
                views=views,
                unit_of=unit_of,
                max_records_per_unit=max_records_per_unit,
            ),
            opacus,
        )
        return self._attach(given, given.group.together(lambda: checked_noise(noise_multiplier, given.method)))

    def keep_within(self, epsilon: float, delta: float, planned: Phase) -> None:
        """Raise BudgetExceeded instead of a step that would pass this target. For loops that plan steps, not epochs.

        planned: the steps that the noise was calibrated for.
        """
        self.run.step_accounting.target = Target(self.accountant, epsilon=epsilon, delta=delta, planned=planned)
        if self._attached is not None and self._attached.attachment is not None:
            self._attached.attachment.expect_steps(planned.steps)

    def _check_unspent(self) -> None:
        if len(self.accountant):
            raise ConfigurationError(
                f"this engine has spent {len(self.accountant)} steps already, which target_epsilon would have to "
                "include: use a new PrivacyEngine, or make_private with a noise_multiplier"
            )

    def _check_unattached(self) -> None:
        if self._attached is not None:
            raise ConfigurationError("this engine is attached to a model already: call engine.detach() first")

    def _calibrated(self, sampling: SamplingPlan, target: TargetArguments) -> Phase:
        """All steps of the planned epochs, with the least noise that keeps them within the target."""
        sample_rate, steps = sampling.accounted(target.epochs)
        noise_multiplier = calibrate_noise(
            accountant=self.accountant.mechanism(),
            target_epsilon=target.epsilon,
            target_delta=target.delta,
            sample_rate=sample_rate,
            steps=steps,
        )
        return Phase(noise_multiplier, sample_rate, steps)

    def _attach(
        self, given: CheckedArguments, noise_multiplier: float
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        with given.group.telling():  # others would wait where ranks meet in it
            attached = assemble(
                given, noise_multiplier, accountant=self.accountant, ledger=self._ledger, secure=self._secure
            )
        self._attached, self._sampling = attached, given.sampling
        return given.wrapper, attached.optimizer, attached.loader

    def get_epsilon(self, delta: float) -> float:
        """The epsilon spent so far at this delta, for adding or removing a record, or with `unit_of` a unit.

        Infinite if any step had no noise."""
        check_delta(delta, self._sampling.records if self._sampling else 1)
        return self.accountant.get_epsilon(delta=delta)

    @property
    def secure_mode(self) -> bool:
        """Whether noise and samples come from a cryptographic generator."""
        return self._secure is not None

    @property
    def subspaces(self) -> dict[str, Subspace]:
        """Name -> L, R and masks of every projected parameter, for the current step."""
        slots = self._recorder_in_use().ready()
        return {name: slot.subspace for name, slot in slots.items() if slot.subspace is not None}

    def per_sample_gradients(self) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """After a backward pass and before the step: name -> (B, *shape), or the pair (B, m, r) and (B, r, n). With
        units of several rows B counts rows.

        Gradients of each sample's own loss, before clipping, zero where masked. They are not private.
        """
        recorder = self._recorder_in_use()
        if not recorder.pending:
            raise PrivacyError("no per-sample gradients: call this after loss.backward() and before optimizer.step()")
        size = recorder.records or 1
        scale = size if self.run.optimizer.gradients.loss_reduction == "mean" else 1
        found: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        for name, slot in recorder.slots.items():
            gradient = slot.inspect()
            if isinstance(gradient, tuple):
                found[name] = gradient[0][:size] * scale, gradient[1][:size] * scale
            else:
                found[name] = gradient[:size] * scale
        return found

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling and recording so far, 0 where nothing is."""
        if self._attached is None:
            raise PrivacyError(_NOT_ATTACHED)
        fast = self._attached.fast
        return 0.0 if fast is None else fast.seconds

    def state_dict(self) -> dict[str, Any]:
        """What a bit-identical continuation needs beside the states of model and optimizer: the books, the random
        streams (torch's own, for dropout, too), the position in epoch and batch. Take it between two batches. It is
        secret: it can undo the noise.
        """
        return self.run.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> None:
        """Continue that run: the next loop over the loader goes on with the very next micro-batch.

        Call it after a `make_private` with the same arguments. A state of another plan is refused, and so is one that
        has spent less than this engine, or than the ledger.
        replay: repeat the steps that the ledger recorded after the state was taken, exactly, which costs nothing more.
            With False, and always in secure mode, they are charged, and samples and noise from here on are new.
        """
        with self.run.group.telling():
            self.run.load_state_dict(state, replay=replay)

    @property
    def run(self) -> RunState:
        """The model, optimizer and sampler that belong together since `make_private`."""
        if self._attached is None:
            raise PrivacyError(_NOT_ATTACHED)
        return self._attached.run

    def detach(self) -> None:
        """Give the model back as it was. The accountant keeps what was spent."""
        if self._attached is not None:
            self._attached.detach()
        self._attached = None

    @property
    def _recorder(self) -> Recorder | None:
        attachment = None if self._attached is None else self._attached.attachment
        return None if attachment is None else attachment.recorder

    def _recorder_in_use(self) -> Recorder:
        if self._recorder is None:
            raise PrivacyError(_NOT_ATTACHED)
        return self._recorder

    @staticmethod
    def is_compatible(module: nn.Module) -> bool:
        """Whether a model can be trained privately as it is."""
        try:
            treat_parameters(module, LSG())
        except ConfigurationError:
            return False
        return not problems(module, [p for p in module.parameters() if p.requires_grad])

    @staticmethod
    def get_compatible_module(module: nn.Module) -> nn.Module:
        """A copy of the model with its BatchNorms turned into GroupNorms and its RNNs into Opacus's."""
        return fix(module)
