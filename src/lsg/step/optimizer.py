"""The private optimizer: clips and sums each micro-batch; ends a logical batch by accounting, noise and an update."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lsg.accounting.step_accounting import Release, StepAccounting
from lsg.distributed.group import Group
from lsg.distributed.sharded_model import ShardedModel
from lsg.distributed.sharding import compute_device
from lsg.errors import ConfigurationError, PrivacyError
from lsg.files.plain_numbers import plain
from lsg.model.parameters_in_place import ParametersInPlace
from lsg.sampling.clock import Clock
from lsg.step.clipping import Clipper
from lsg.step.exchange import Place
from lsg.step.foreign_loops import refuse_foreign_loop
from lsg.step.gradients import GradientSource, PrivateGradients
from lsg.step.parts import PART_BYTES, steps_in_parts
from lsg.step.rate_watch import RateWatch
from lsg.step.replicas import Replicas, settings_of
from lsg.step.signals import StepSignals


class PrivateOptimizer(Optimizer):
    """Wraps a torch optimizer. `step()` is a real step only at the end of a logical batch.

    Reads as Opacus's DPOptimizer: `noise_multiplier`, `max_grad_norm`, `expected_batch_size`, `original_optimizer`.
    Parameter groups and state are the wrapped optimizer's own, so learning-rate schedulers work on it.

    in_place: looks, before each release, whether the model still computes with the trained parameters. replicas: looks,
    now and then, whether all ranks have the same ones. group: the ranks that share each logical batch. sharded: the
    model's weights, where ranks share them out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: GradientSource,
        clock: Clock,
        step_accounting: StepAccounting,
        *,
        noise_multiplier: float,
        trained: Sequence[nn.Parameter],
        in_place: ParametersInPlace | None = None,
        replicas: Replicas | None = None,
        group: Group | None = None,
        sharded: ShardedModel | None = None,
    ) -> None:
        self.original_optimizer = optimizer
        self.gradients, self.clock = gradients, clock
        self.noise_multiplier = noise_multiplier
        self._device_type = compute_device(optimizer.param_groups[0]["params"][0]).type
        self.sharded = sharded
        self.stepped = False  # whether the last call of step() was a real step
        self._closed = False
        self._step_accounting, self._trained, self._in_place = step_accounting, trained, in_place
        self._group = group or Group()
        self._rates = RateWatch()
        self._replicas, self._releases = replicas, 0  # so many logical steps since `make_private`
        self._after_steps: list[Callable[[], None]] = []

    # -- what an optimizer is expected to have ---------------------------------------------------------------------
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigurationError("parameters cannot be added to a private optimizer: add them before make_private")

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.original_optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a private optimizer cannot be pickled or copied; save its state_dict()")

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.original_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.original_optimizer.register_step_post_hook(hook)

    def on_logical_step(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call this after each logical step, on every rank alike: also after steps of an empty batch, or of one that
        this rank has no share of, which the loop over the loader does not see. Returns what ends it."""
        self._after_steps.append(call)
        return lambda: self._after_steps.remove(call)

    def attach_step_hook(self, hook: Callable[["PrivateOptimizer"], None]) -> None:
        """As in Opacus: called with this optimizer at each real step, when the noisy gradients are made and before they
        are applied."""
        self.register_step_pre_hook(lambda *_: hook(self))

    # -- privacy -----------------------------------------------------------------------------------------------------
    @property
    def expected_batch_size(self) -> int:
        """What sums are divided by. It belongs to the sampling plan and cannot be set."""
        return self.gradients.expected_batch_size

    @property
    def max_grad_norm(self) -> float:
        """The threshold; of several ("per_layer") their joint norm, which is the sensitivity."""
        return self._clipper.bound

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | list[float]) -> None:
        """A list: one for each trained parameter. A number, where there is a list: all of them in proportion."""
        clipper, norm = self._clipper, plain(tuple(value) if isinstance(value, list | tuple) else value)
        assert isinstance(self.gradients, PrivateGradients)
        if isinstance(clipper.max_grad_norm, tuple) and not isinstance(norm, tuple):
            joint = replace(clipper, max_grad_norm=norm).bound  # refused there, where it is no threshold
            norm = tuple(c * joint / clipper.bound for c in clipper.max_grad_norm)
        changed = replace(clipper, max_grad_norm=norm)
        changed.thresholds(len(self.gradients.recorder.slots))  # refuses another number of them
        self.gradients.clipper = changed

    @property
    def max_grad_norms(self) -> list[float]:
        """With "per_layer" clipping: the threshold of each trained parameter."""
        if self._clipper.mode != "per_layer":
            raise AttributeError(f"max_grad_norms: {self._clipper.mode} clipping has one threshold, max_grad_norm")
        assert isinstance(self.gradients, PrivateGradients)
        return self._clipper.thresholds(len(self.gradients.recorder.slots))

    @property
    def signals(self) -> StepSignals | None:
        """What the last logical step was made of: share clipped, lengths of signal, noise and update. NOT private.

        None before the first step, and without privacy."""
        return self.gradients.signals

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """`GradScaler.step(optimizer)` asks this before it does anything."""
        raise ConfigurationError(
            "GradScaler cannot be used with a private optimizer: it would unscale gradients after the clip, and skip "
            "steps because of the data. Train in bfloat16, which needs none: torch.autocast(dtype=torch.bfloat16)"
        )

    @property
    def _clipper(self) -> Clipper:
        if not isinstance(self.gradients, PrivateGradients):
            raise AttributeError("max_grad_norm: non-private training does not clip")
        return self.gradients.clipper

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients not yet stepped on. What a logical batch has summed up so far is kept."""
        self.gradients.drop_pending()
        self.original_optimizer.zero_grad(set_to_none=True)

    def step(self, closure: Any = None) -> Any:
        """Clip and sum this micro-batch; at the end of a logical batch also account, add noise and update.

        The noisy gradients of a real step stay in the parameters' `.grad`; where they would take more than 1 GiB, they
        exist in parts and are gone after it (a step hook on the optimizer keeps them).

        closure: computes the loss and its gradients (and calls zero_grad before, if anybody). It is called once; the
        step comes after it, and what it returned is returned."""
        try:
            return self._step(closure)
        except Exception as error:
            self._group.tell(error)  # others may wait for this rank's part of the step
            raise

    def _step(self, closure: Any) -> Any:
        if closure is not None:
            return self._step_after(closure)
        self._check_step()
        batch = self.clock.batch
        self._rates.look(self.param_groups, ends_logical_batch=batch.last)
        self.clock.step_begins()
        # Whatever precision the model runs in, clipping, sums and noise are float32 or better.
        with torch.autocast(self._device_type, enabled=False):
            self.gradients.collect(batch.left, batch.units_among(batch.left))
            if batch.left:
                self.clock.part_collected(batch.left)  # in the sum for good, also where the step fails after this
            self.stepped = batch.last and not batch.stepped
            if self.stepped:
                self._release()
        self.clock.batch_stepped()
        if self.stepped:
            for call in tuple(self._after_steps):
                call()

    def _step_after(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.step()
        return loss

    def _check_step(self) -> None:
        """Refuse a step that would not be accounted for, or that would count a record twice or not at all."""
        batch = self.clock.batch
        if self._closed:
            raise PrivacyError("this optimizer's engine was detached: its steps would not be accounted for")
        if self.clock.epoch is None and self.noise_multiplier:
            refuse_foreign_loop()
        if self.clock.loaded is not None:
            raise PrivacyError(
                "the loaded state is in the middle of an epoch: iterate over the loader to finish it before other steps"
            )
        if batch.size != 0 and self.gradients.left_over():
            raise PrivacyError(
                "gradients of an earlier batch, which had its step, were left when this one came: one backward and one "
                "step a batch. Call optimizer.zero_grad() after a backward that is not for this optimizer's step"
            )
        if batch.size and not batch.left and not batch.stepped and self.gradients.pending():
            raise PrivacyError(
                "this batch is in the sum already: its step failed after that, and another backward would count it "
                "twice. Try optimizer.step() alone again"
            )
        if batch.stepped and self.gradients.pending():
            raise PrivacyError(
                "optimizer.step() was called again for the same batch of the loader: one batch, one step, or a sample "
                "would count several times"
            )
        if batch.collected and batch.left and not self.gradients.pending():
            raise PrivacyError(
                f"{batch.left} of the {batch.size} records of the batch have had no backward: accumulate() "
                "takes in a part of a batch, and the rest must follow"
            )

    def accumulate(self, size: int) -> None:
        """Clip and sum the gradients of `size` records (rows, where a unit has several) of the batch in flight: a part
        of it, in whole units, or all. `step()` does what is left. For batches that do not fit into memory as a whole:
        `lsg.step.out_of_memory.BackwardInPieces`."""
        batch = self.clock.batch
        left = batch.left
        if self._closed or left is None or batch.stepped:
            raise PrivacyError("accumulate(): there is no batch of the private loader in flight")
        if not 0 < size <= left:
            raise PrivacyError(
                f"accumulate({size}): {left} of the batch's {batch.size} records are left, and each counts once"
            )
        if not self.gradients.pending():
            raise PrivacyError(
                f"accumulate({size}): no backward came before it. Each part has one of its own, or several records "
                "would be clipped as one"
            )
        with torch.autocast(self._device_type, enabled=False):
            self.gradients.collect(size, batch.units_among(size))
        self.gradients.renew()  # the next part has a graph of its own
        self.clock.part_collected(size)

    def _release(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # nothing is trained on a gradient that did not come through release()
        if self.sharded is not None:
            self.sharded.reshard()  # an evaluation may have left weights gathered, which would be old ones after this
        if self._in_place is not None:
            self._in_place.check()
        self._releases += 1
        batch = self.clock.batch
        self.gradients.exchange(Place(self._releases, self._alike, batch.drawn, batch.share))
        # The step is accounted for before its noise is drawn: whatever happens next, it counts.
        self._step_accounting.count(self._next_release())
        self._update()
        self.gradients.drop_pending()
        if self._replicas is not None:
            self._replicas.check_now_and_then(self._releases)

    def _alike(self) -> dict[str, Any]:
        """By name, what every rank must have alike when it is released: noise differs where a stream does, say."""
        private = isinstance(self.gradients, PrivateGradients)
        return {
            "the epoch": self.clock.epoch,
            "the place in the epoch": self.clock.done[0],
            "the number of units drawn": self.clock.batch.drawn,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self._clipper.max_grad_norm if private else None,
            "what was spent, and what may be": self._step_accounting.facts(),
            "the optimizer's settings (its learning rate, say)": settings_of(self.original_optimizer),
            **(self._replicas.streams() if self._replicas else {}),
        }

    def check_replicas(self) -> None:
        """Raise ReplicaError unless all ranks have the same weights. The loader asks at the end of each epoch."""
        if self._replicas is not None:
            self._replicas.check(self._releases)

    def _update(self) -> None:
        """Noise, lift and the wrapped optimizer's step: large models' gradients never exist together (`parts.py`)."""
        if isinstance(self.gradients, PrivateGradients) and steps_in_parts(self.original_optimizer, self._trained):
            for _ in self.gradients.release_in_parts(self.noise_multiplier, PART_BYTES):
                self.original_optimizer.step()
        else:
            self.gradients.release(self.noise_multiplier)
            self.original_optimizer.step()

    def _next_release(self) -> Release:
        private = self.gradients if isinstance(self.gradients, PrivateGradients) else None
        return Release(
            noise_multiplier=self.noise_multiplier,
            epoch=self.clock.epoch,
            weights=self._trained,
            total=None if private is None or private.sum is None else private.sum.vector,
            noise=None if private is None else private.noise,
        )

    def mark_continued(self) -> None:
        """Tell torch's schedulers, which ask whether a step came before theirs, that one did: in the saved run."""
        self._opt_called = True

    def close(self) -> None:
        """The engine was detached: nothing may be released any more."""
        self._closed = True
