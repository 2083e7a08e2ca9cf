"""The private optimizer: per-sample gradients in, noisy steps of the user's own optimizer out."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lsg.clipping import ClippedSum, Clipper
from lsg.errors import ConfigurationError, PrivacyError
from lsg.layers.recorder import Recorder
from lsg.noise import add_noise

LossReduction = Literal["mean", "sum"]


class GradientSource(Protocol):
    """Where gradients of a logical batch come from: micro-batch by micro-batch, then released as one."""

    def collect(self, expected_size: int | None) -> None:
        """Take in the gradients that the last backward pass left, of so many records if that is known."""

    def drop_pending(self) -> None:
        """Forget gradients that were not collected."""

    def pending(self) -> bool:
        """Whether a backward pass left gradients that were not collected."""

    def renew(self) -> None:
        """A new micro-batch: what an earlier one still computes must not reach it."""

    def forget_sum(self) -> None:
        """Drop what was collected since the last release."""

    def release(self, noise_multiplier: float) -> None:
        """Put the gradient of the logical batch into the parameters' `.grad`, and start the next batch."""


class PrivateGradients:
    """Clip, sum, add noise, lift: the privacy rules in the order of the design."""

    def __init__(
        self,
        recorder: Recorder,
        clipper: Clipper,
        *,
        loss_reduction: LossReduction,
        expected_batch_size: int,
        noise_generator: torch.Generator,
    ) -> None:
        self.recorder, self.clipper = recorder, clipper
        self.loss_reduction, self.expected_batch_size = loss_reduction, expected_batch_size
        self.noise_generator = noise_generator
        self.sum: ClippedSum | None = None

    def pending(self) -> bool:
        return self.recorder.pending

    def drop_pending(self) -> None:
        self.recorder.clear()

    def renew(self) -> None:
        self.recorder.renew()

    def forget_sum(self) -> None:
        self.recorder.holding = False
        self.sum = None

    @torch.no_grad()
    def collect(self, expected_size: int | None) -> None:
        if not self.recorder.pending:
            return
        size = self.recorder.batch.records
        assert size is not None
        if expected_size is not None and size != expected_size:
            raise PrivacyError(
                f"the loader handed out {expected_size} records but the model took them for {size} samples: the first "
                "dimension of the model's first input must be the record, or clipping would not bound a record"
            )
        scale = size if self.loss_reduction == "mean" else 1.0
        # Rows that padding added copy a record: they must not enter the sum, whatever became of their outputs.
        per_sample = [[part[:size] for part in parts] for parts in self.recorder.per_sample()]
        part = self.clipper.clip(per_sample, scale, self.recorder.positions)
        self.sum = part if self.sum is None else self.sum + part
        self.recorder.holding = True
        self.recorder.clear()

    @torch.no_grad()
    def release(self, noise_multiplier: float) -> None:
        self.recorder.ready()
        clipped = self.sum if self.sum is not None else self._empty_sum()
        noisy = add_noise(clipped, noise_multiplier, self.noise_generator)
        # Rule 4: the expected batch size, never the actual one.
        mean = noisy.vector / self.expected_batch_size if self.loss_reduction == "mean" else noisy.vector
        for slot, gradient in self.recorder.lift(mean):
            parameter = slot.parameter
            if slot.narrow is None:
                # In the parameter's own memory layout (channels last, say), which fused optimizers insist on.
                same = gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride()
                parameter.grad = gradient if same else torch.empty_like(parameter).copy_(gradient)
            else:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad.narrow(*slot.narrow).copy_(gradient)
        self.sum = None
        self.recorder.advance()

    def _empty_sum(self) -> ClippedSum:
        slots = list(self.recorder.slots.values())
        total = sum(slot.dimensions for slot in slots)
        like = slots[0]
        return ClippedSum(torch.zeros(total, dtype=like.dtype, device=like.parameter.device), self.clipper.bound)


class PlainGradients:
    """Non-private training in the same loop: the sum of ordinary gradients, over the expected batch size."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        micro_batch_size: Callable[[], int],
        *,
        loss_reduction: LossReduction,
        expected_batch_size: int,
    ) -> None:
        self.parameters = list(parameters)
        self.micro_batch_size = micro_batch_size
        self.loss_reduction, self.expected_batch_size = loss_reduction, expected_batch_size
        self._sums: list[Tensor] | None = None

    def pending(self) -> bool:
        return any(p.grad is not None for p in self.parameters)

    def drop_pending(self) -> None:
        for p in self.parameters:
            p.grad = None

    def renew(self) -> None:
        self.drop_pending()

    def forget_sum(self) -> None:
        self._sums = None

    @torch.no_grad()
    def collect(self, expected_size: int | None) -> None:
        if not self.pending():
            return
        scale = self.micro_batch_size() if self.loss_reduction == "mean" else 1
        parts = [torch.zeros_like(p) if p.grad is None else p.grad * scale for p in self.parameters]
        self._sums = parts if self._sums is None else [s + g for s, g in zip(self._sums, parts, strict=True)]
        self.drop_pending()

    @torch.no_grad()
    def release(self, noise_multiplier: float) -> None:
        divisor = self.expected_batch_size if self.loss_reduction == "mean" else 1
        sums = self._sums or [torch.zeros_like(p) for p in self.parameters]
        for p, total in zip(self.parameters, sums, strict=True):
            p.grad = total / divisor
        self._sums = None


class PrivateOptimizer(Optimizer):
    """Wraps a torch optimizer. `step()` is a real step only at the end of a logical batch.

    Reads as Opacus's DPOptimizer: `noise_multiplier`, `max_grad_norm`, `expected_batch_size`, `original_optimizer`.
    Parameter groups and state are the wrapped optimizer's own, so learning-rate schedulers work on it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: GradientSource,
        *,
        noise_multiplier: float,
        expected_batch_size: int,
        before_release: Callable[[float, int | None], None],
    ) -> None:
        self.original_optimizer = optimizer
        self.gradients = gradients
        self.noise_multiplier = noise_multiplier
        self.expected_batch_size = expected_batch_size
        self._device_type = optimizer.param_groups[0]["params"][0].device.type
        self.stepped = False  # whether the last call of step() was a real step
        self._epoch: int | None = None  # of the private loader that hands out the batches, None outside of one
        self._epochs_begun = 0
        self._closed = False
        self._before_release = before_release
        self._micro = _ANY_BATCH

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

    # -- privacy -----------------------------------------------------------------------------------------------------
    @property
    def max_grad_norm(self) -> float | list[float]:
        norm = self._clipper.max_grad_norm
        return list(norm) if isinstance(norm, tuple) else norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | list[float]) -> None:
        assert isinstance(self.gradients, PrivateGradients)
        norm = tuple(value) if isinstance(value, list | tuple) else value
        self.gradients.clipper = replace(self._clipper, max_grad_norm=norm)

    @property
    def _clipper(self) -> Clipper:
        if not isinstance(self.gradients, PrivateGradients):
            raise AttributeError("max_grad_norm: non-private training does not clip")
        return self.gradients.clipper

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients not yet stepped on. What a logical batch has summed up so far is kept."""
        self.gradients.drop_pending()
        self.original_optimizer.zero_grad(set_to_none=True)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip and sum this micro-batch; at the end of a logical batch also noise, account and update."""
        if closure is not None:
            raise ConfigurationError("step(closure): closures are not supported, a private step sees its batch once")
        if self._closed:
            raise PrivacyError("this optimizer's engine was detached: its steps would not be accounted for")
        if self._micro.stepped and self.gradients.pending():
            raise PrivacyError(
                "optimizer.step() was called again for the same batch of the loader: one batch, one step, or a sample "
                "would count several times"
            )
        # Whatever precision the model runs in, clipping, sums and noise are float32 or better.
        with torch.autocast(self._device_type, enabled=False):
            self.gradients.collect(self._micro.size)
            self.stepped = self._micro.last and not self._micro.stepped
            if self.stepped:
                self._release()
        if self._epoch is not None:
            self._micro = replace(self._micro, stepped=True)

    def _release(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # nothing is trained on a gradient that did not come through release()
        # The step is accounted for before its noise is drawn: whatever happens next, it counts.
        self._before_release(self.noise_multiplier, self._epoch)
        self.gradients.release(self.noise_multiplier)
        self.original_optimizer.step()
        self.gradients.drop_pending()

    # -- what the loader tells (StepGate) ------------------------------------------------------------------------
    def enter_epoch(self) -> int:
        self._epochs_begun += 1
        self._epoch, self._micro = self._epochs_begun, _NO_BATCH
        self.gradients.forget_sum()
        self.gradients.renew()
        return self._epoch

    def begin_micro_batch(self, epoch: int, *, size: int, last: bool) -> None:
        self.finish_epoch(epoch)
        self.gradients.renew()
        self._micro = _MicroBatch(size=size, last=last, stepped=False)

    def empty_step(self, epoch: int) -> None:
        self.begin_micro_batch(epoch, size=0, last=True)
        self.step()

    def finish_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise PrivacyError("a newer epoch of the loader has begun: iterate over it once at a time")
        if not self._micro.stepped:
            raise PrivacyError(
                "the loader was asked for the next batch before optimizer.step(): every batch of the loader needs one "
                "step, or the steps taken and the steps accounted for would differ. lsg accumulates by itself; use "
                "max_physical_batch_size for large batches"
            )
        if self.gradients.pending():
            raise PrivacyError("gradients of a batch that had its step are left: one backward and one step a batch")

    def leave_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._epoch, self._micro = None, _ANY_BATCH
            self.gradients.forget_sum()

    def close(self) -> None:
        """The engine was detached: nothing may be released any more."""
        self._closed = True


@dataclass(frozen=True)
class _MicroBatch:
    """The batch in flight: its number of records, whether it ends its logical batch, whether it has had its step."""

    size: int | None
    last: bool
    stepped: bool


_ANY_BATCH = _MicroBatch(size=None, last=True, stepped=False)  # not from our loader: a logical batch of its own
_NO_BATCH = _MicroBatch(size=None, last=False, stepped=True)  # an epoch has begun, its first batch is not out yet
