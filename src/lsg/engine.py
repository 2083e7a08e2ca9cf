"""`PrivacyEngine`: puts plan, rules, sampling, clipping, noise and accounting together behind Opacus's API."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lsg.accounting.epsilon import Accountant, Phase, calibrate_noise, create_accountant
from lsg.accounting.ledger import Ledger, fingerprint, seal
from lsg.accounting.step_accounting import StepAccounting, Target
from lsg.errors import ConfigurationError, PrivacyError
from lsg.files.plain_numbers import plain
from lsg.fix import fix
from lsg.layers.install import is_private
from lsg.layers.treatments import treat_parameters
from lsg.methods import LSG, Method, NonPrivate
from lsg.model.attachment import Attachment
from lsg.model.guards import Guards
from lsg.model.non_private import NonPrivateModel
from lsg.model.opacus import check_opacus_arguments, refuse_opacus
from lsg.model.recorder import Recorder
from lsg.model.validation import (
    check_budget,
    check_delta,
    check_model,
    check_noise,
    check_one_process,
    problems,
    trained_parameters,
    untrained_parameters,
    warn_of_hooks,
    warn_of_others,
)
from lsg.perf import PerfConfig
from lsg.sampling.loader import PrivateDataLoader, known_lengths, sampling_generator, sampling_plan
from lsg.sampling.plan import LogicalBatches, SamplingPlan
from lsg.sampling.random_sources import NoiseSource, TorchNoise, fresh_generator
from lsg.sampling.secure_source import SecureNoise
from lsg.step.clipping import Clipper, Clipping
from lsg.step.gradients import LossReduction, NonPrivateGradients, PrivateGradients
from lsg.step.optimizer import PrivateOptimizer
from lsg.step.run_state import Run, describe
from lsg.subspace import Subspace


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
        self._recorder: Recorder | None = None
        self._attachment: Attachment | None = None
        self._guards: Guards | None = None
        self._plain: NonPrivateModel | None = None
        self._sampling: SamplingPlan | None = None
        self._optimizer: PrivateOptimizer | None = None
        self._run: Run | None = None

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
        **opacus: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        """As `make_private`, with the least noise that keeps `epochs` epochs within (target_epsilon, target_delta).

        The optimizer raises BudgetExceeded instead of a step that would pass the target.
        """
        check_opacus_arguments("make_private_with_epsilon", opacus)
        refuse_opacus(module, optimizer, data_loader)
        if isinstance(method, NonPrivate):
            raise ConfigurationError("NonPrivate has no epsilon: use make_private(noise_multiplier=0)")
        target_epsilon, target_delta, epochs = (plain(value) for value in (target_epsilon, target_delta, epochs))
        if not isinstance(epochs, int | float) or epochs < 1 or not float(epochs).is_integer():
            raise ConfigurationError(f"epochs={epochs!r} must be a whole number of at least 1")
        plan = sampling_plan(data_loader, poisson=poisson_sampling)
        check_budget(target_epsilon, target_delta, plan.records)
        if len(self.accountant):
            raise ConfigurationError(
                f"this engine has spent {len(self.accountant)} steps already, which target_epsilon would have to "
                "include: use a new PrivacyEngine, or make_private with a noise_multiplier"
            )
        check_model(module, trained_parameters(module, optimizer))  # before the calibration, which takes a while
        sample_rate, steps = plan.accounted(int(epochs))
        noise_multiplier = calibrate_noise(
            accountant=self.accountant.mechanism(),
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            steps=steps,
        )
        private = self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            method=method,
            max_physical_batch_size=max_physical_batch_size,
            clipping=clipping,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            batch_first=batch_first,
            noise_generator=noise_generator,
            perf=perf,
            **opacus,
        )
        planned = Phase(noise_multiplier, sample_rate, steps)
        self.run.step_accounting.target = Target(
            self.accountant, epsilon=target_epsilon, delta=target_delta, planned=planned
        )
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
        **opacus: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        """Returns the same model, now recording per-sample gradients; a private optimizer; a Poisson loader.

        noise_multiplier: standard deviation of the noise over `max_grad_norm`; 0 is allowed, epsilon is then infinite.
        perf: settings for speed; none changes a guarantee.
        loss_reduction: whether the loss given to `backward` is the mean or the sum over the micro-batch.
        noise_generator: makes a run repeatable; without it all randomness comes from the operating system.
        opacus: what Opacus takes beside these (`grad_sample_mode`, say), where it changes nothing here.
        """
        check_opacus_arguments("make_private", opacus)
        refuse_opacus(module, optimizer, data_loader)
        method = LSG() if method is None else method
        perf = perf or PerfConfig()
        noise_multiplier, max_grad_norm = plain(noise_multiplier), plain(max_grad_norm)
        max_physical_batch_size = plain(max_physical_batch_size)
        if not isinstance(method, Method):
            raise ConfigurationError(f"method={method!r} must be LSG, RGP, SparseDPSGD, DPSGD or NonPrivate")
        if not isinstance(perf, PerfConfig):
            raise ConfigurationError(f"perf={perf!r} must be a PerfConfig")
        if noise_generator is not None and not isinstance(noise_generator, torch.Generator):
            raise ConfigurationError(f"noise_generator={noise_generator!r} must be a torch.Generator")
        if self._optimizer is not None:
            raise ConfigurationError("this engine is attached to a model already: call engine.detach() first")
        check_one_process()
        if not batch_first:
            raise ConfigurationError("batch_first=False: inputs must have the batch first")
        if loss_reduction not in ("mean", "sum"):
            raise ConfigurationError(f"loss_reduction={loss_reduction!r} must be 'mean' or 'sum'")
        check_noise(noise_multiplier)
        if is_private(module):
            raise ConfigurationError(
                "module is attached to another PrivacyEngine: call that engine's detach() first (or make the model "
                "anew, if that engine is lost, as when a notebook's cell is run twice)"
            )
        if isinstance(optimizer, PrivateOptimizer):
            raise ConfigurationError("optimizer is private already: pass the original one")
        trained = trained_parameters(module, optimizer)
        warn_of_others(module, optimizer)
        sampling = sampling_plan(data_loader, poisson=poisson_sampling)
        clipper = Clipper(clipping, tuple(max_grad_norm) if isinstance(max_grad_norm, list | tuple) else max_grad_norm)
        streams = _Streams(noise_generator, sampling_generator(data_loader), self._secure)
        sampler = LogicalBatches(
            sampling,
            streams.sampling(),
            max_physical_batch_size,
            known_lengths(data_loader.dataset),
            perf.max_tokens,
        )
        gradients: PrivateGradients | NonPrivateGradients
        if isinstance(method, NonPrivate):
            if noise_multiplier:
                raise ConfigurationError(f"NonPrivate adds no noise: noise_multiplier={noise_multiplier} must be 0")
            self._plain = NonPrivateModel(module, trained, perf)
            gradients = NonPrivateGradients(
                trained,
                self._plain.size,
                loss_reduction=loss_reduction,
                expected_batch_size=sampling.expected_batch_size,
            )
        else:
            check_model(module, trained)
            warn_of_hooks(module, trained)
            treatments = treat_parameters(module, method, trained)
            if clipping == "per_layer":
                clipper.thresholds(sum(t.kind != "frozen" for t in treatments.parameters))
            device = trained[0].device
            self._recorder = Recorder(
                treatments.parameters,
                method,
                streams.projection(device),
                perf,
                max_physical_batch_size if sampler.max_tokens is None else None,
                untrained_parameters(module, optimizer),
            )
            self._attachment = Attachment(module, treatments, self._recorder, perf, loss_reduction)
            gradients = PrivateGradients(
                self._recorder,
                clipper,
                loss_reduction=loss_reduction,
                expected_batch_size=sampling.expected_batch_size,
                noise=streams.noise(device),
            )
        self._sampling = sampling
        step_accounting = StepAccounting(
            self.accountant,
            sampling,
            ledger=self._ledger,
            weights=lambda: fingerprint(trained),
            total=lambda: _sealed(gradients),
            replayable=sampler.source.replayable,
        )

        def before_release(noise_multiplier: float, epoch: int | None) -> None:
            if self._guards is not None:
                self._guards.parameters.check()
            step_accounting.count(noise_multiplier, epoch)

        self._optimizer = PrivateOptimizer(
            optimizer,
            gradients,
            noise_multiplier=noise_multiplier,
            before_release=before_release,
        )
        if self._attachment is not None:
            self._guards = Guards(self._attachment, self._optimizer, trained, loss_reduction)
        plan = {
            "records": sampling.records,
            "batch_size": sampling.batch_size,
            "poisson_sampling": sampling.poisson,
            "max_physical_batch_size": max_physical_batch_size,
            "max_tokens": perf.max_tokens,
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
            "clipping": clipping,
            "loss_reduction": loss_reduction,
            "method": describe(method),
            "accountant": self.accountant.name,
        }
        self._run = Run(module, self._optimizer, sampler, step_accounting, plan)
        return module, self._optimizer, PrivateDataLoader(data_loader, sampler, self._optimizer)

    def get_epsilon(self, delta: float) -> float:
        """The epsilon spent so far at this delta; infinite if any step had no noise."""
        check_delta(delta, self._sampling.records if self._sampling else 1)
        return self.accountant.get_epsilon(delta=delta)

    @property
    def secure_mode(self) -> bool:
        """Whether noise and samples come from a cryptographic generator."""
        return self._secure is not None

    @property
    def subspaces(self) -> dict[str, Subspace]:
        """Name -> L, R and masks of every projected parameter, for the current step."""
        slots = self._attached().recorder.ready()
        return {name: slot.subspace for name, slot in slots.items() if slot.subspace is not None}

    def per_sample_gradients(self) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """After a backward pass and before the step: name -> (B, *shape), or the pair (B, m, r) and (B, r, n).

        Gradients of each sample's own loss, before clipping, zero where masked. They are not private.
        """
        recorder = self._attached().recorder
        if not recorder.pending:
            raise PrivacyError("no per-sample gradients: call this after loss.backward() and before optimizer.step()")
        assert self._optimizer is not None and isinstance(self._optimizer.gradients, PrivateGradients)
        size = recorder.records or 1
        scale = size if self._optimizer.gradients.loss_reduction == "mean" else 1
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
        fast = self._attached().fast if self._plain is None else self._plain.fast
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
        self.run.load_state_dict(state, replay=replay)

    @property
    def run(self) -> Run:
        """The model, optimizer and sampler that belong together since `make_private`."""
        if self._run is None:
            raise PrivacyError("this engine is not attached to a model: call make_private first")
        return self._run

    def detach(self) -> None:
        """Give the model back as it was. The accountant keeps what was spent."""
        if self._optimizer is not None:
            self._optimizer.close()
        if self._attachment is not None:
            self._attachment.detach()
        if self._guards is not None:
            self._guards.remove()
        if self._plain is not None:
            self._plain.detach()
        self._recorder = self._attachment = self._guards = self._plain = self._optimizer = self._run = None

    def _attached(self) -> Attachment:
        if self._attachment is None:
            raise PrivacyError("this engine is not attached to a model: call make_private first")
        return self._attachment

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


def _sealed(gradients: PrivateGradients | NonPrivateGradients) -> str:
    """The sum about to be released, for the ledger; gradients without noise need no seal."""
    if isinstance(gradients, NonPrivateGradients):
        return ""
    return seal(None if gradients.sum is None else gradients.sum.vector, gradients.noise.state())


class _Streams:
    """Separate random streams: of the user's generators, derived from them, or from the operating system."""

    def __init__(
        self,
        noise: torch.Generator | None,
        sampling: torch.Generator | None,
        secure: SecureNoise | None,
    ) -> None:
        if secure is not None and noise is not None:
            raise ConfigurationError("noise_generator is given, but secure_mode=True draws noise that nobody repeats")
        if secure is not None and sampling is not None:
            raise ConfigurationError(
                "data_loader has a generator of its own, but secure_mode=True draws samples that nobody can repeat: "
                "make the DataLoader without generator="
            )
        # One generator for both would be one stream, and going on from a saved state would draw other samples.
        self._noise, self._sampling, self._secure = noise, None if sampling is noise else sampling, secure
        self._state = None if noise is None else bytes(noise.get_state().tolist())

    def noise(self, device: torch.device) -> NoiseSource:
        return self._secure or (TorchNoise(self._noise) if self._noise else TorchNoise.fresh(device))

    def sampling(self) -> NoiseSource:
        if self._secure is not None:
            return self._secure
        generator = self._sampling or self._derived("sampling", torch.device("cpu"))
        return TorchNoise(generator) if generator else TorchNoise.fresh(torch.device("cpu"))

    def projection(self, device: torch.device) -> torch.Generator:
        """Not secret: what it decides is computed from the weights and shown in `engine.subspaces`."""
        return self._derived("projection", device) or fresh_generator(device)

    def _derived(self, purpose: str, device: torch.device) -> torch.Generator | None:
        if self._state is None:
            return None
        return fresh_generator(device, purpose.encode() + b":" + self._state)
