"""The private optimizer: when a step is real, and that each batch gets exactly one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from lsg.errors import ConfigurationError, PrivacyError
from lsg.files.plain_numbers import plain
from lsg.step.clipping import Clipper
from lsg.step.gradients import GradientSource, PrivateGradients


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
        before_release: Callable[[float, int | None], None],
    ) -> None:
        self.original_optimizer = optimizer
        self.gradients = gradients
        self.noise_multiplier = noise_multiplier
        self._device_type = optimizer.param_groups[0]["params"][0].device.type
        self.stepped = False  # whether the last call of step() was a real step
        self._epoch: int | None = None  # of the private loader that hands out the batches, None outside of one
        self._loops = 0  # over the loader, begun so far: tells one from an older one
        self._begun = False  # whether this epoch had a step, or part of one, whatever became of it
        self.epochs_done = 0
        self.done = (0, 0)  # of this epoch: logical batches that had their step, micro-batches of the next
        self._waiting: Progress | None = None  # a loaded position in the middle of an epoch, until the loop takes it up
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
    def batch_in_flight(self) -> "_MicroBatch | None":
        """The batch of the loader that the next gradients belong to, another object after each part; None outside."""
        return None if self._micro.size is None or self._micro.stepped else self._micro

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

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip and sum this micro-batch; at the end of a logical batch also noise, account and update."""
        if closure is not None:
            raise ConfigurationError("step(closure): closures are not supported, a private step sees its batch once")
        if self._closed:
            raise PrivacyError("this optimizer's engine was detached: its steps would not be accounted for")
        if self._waiting is not None:
            raise PrivacyError(
                "the loaded state is in the middle of an epoch: iterate over the loader to finish it before other steps"
            )
        if self._micro.size != 0 and self.gradients.left_over():
            raise PrivacyError(
                "gradients of an earlier batch, which had its step, were left when this one came: one backward and one "
                "step a batch. Call optimizer.zero_grad() after a backward that is not for this optimizer's step"
            )
        if self._micro.stepped and self.gradients.pending():
            raise PrivacyError(
                "optimizer.step() was called again for the same batch of the loader: one batch, one step, or a sample "
                "would count several times"
            )
        if self._micro.collected and self._micro.left and not self.gradients.pending():
            raise PrivacyError(
                f"{self._micro.left} of the {self._micro.size} records of the batch have had no backward: accumulate() "
                "takes in a part of a batch, and the rest must follow"
            )
        self._begun = True
        # Whatever precision the model runs in, clipping, sums and noise are float32 or better.
        with torch.autocast(self._device_type, enabled=False):
            self.gradients.collect(self._micro.left)
            self.stepped = self._micro.last and not self._micro.stepped
            if self.stepped:
                self._release()
        if self._epoch is not None and not self._micro.stepped:
            logical, micro = self.done
            self.done = (logical + 1, 0) if self._micro.last else (logical, micro + 1)
            self._micro = replace(self._micro, stepped=True)

    def accumulate(self, size: int) -> None:
        """Clip and sum the gradients of `size` records of the batch in flight: a part of it, or all. `step()` does what
        is left. For batches that do not fit into memory as a whole: `lsg.step.out_of_memory.BackwardInPieces`."""
        left = self._micro.left
        if self._closed or left is None or self._micro.stepped:
            raise PrivacyError("accumulate(): there is no batch of the private loader in flight")
        if not 0 < size <= left:
            raise PrivacyError(
                f"accumulate({size}): {left} of the batch's {self._micro.size} records are left, and each counts once"
            )
        if not self.gradients.pending():
            raise PrivacyError(
                f"accumulate({size}): no backward came before it. Each part has one of its own, or several records "
                "would be clipped as one"
            )
        with torch.autocast(self._device_type, enabled=False):
            self.gradients.collect(size)
        self.gradients.renew()  # the next part has a graph of its own
        self._micro = replace(self._micro, collected=self._micro.collected + size)

    def _release(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # nothing is trained on a gradient that did not come through release()
        # The step is accounted for before its noise is drawn: whatever happens next, it counts.
        self._before_release(self.noise_multiplier, None if self._epoch is None else self.epochs_done)
        self.gradients.release(self.noise_multiplier)
        self.original_optimizer.step()
        self.gradients.drop_pending()

    # -- what the loader tells (LoaderEvents) ------------------------------------------------------------------------
    def enter_epoch(self) -> int:
        if self._epoch is not None:
            self.leave_epoch(self._epoch)
        self._loops += 1
        self._epoch, self._micro, self.done, self._begun = self._loops, _NO_BATCH, (0, 0), self._waiting is not None
        self.gradients.forget_sum()
        self.gradients.drop_pending()
        self.gradients.renew()
        if self._waiting is not None:
            self.done = self._waiting.logical, self._waiting.micro
            if self._waiting.partial_sum is not None:
                self.gradients.load_partial_sum(self._waiting.partial_sum)
            self._waiting = None
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
                "the loader was asked for the next batch before optimizer.step() of the optimizer that make_private "
                "returned: every batch of the loader needs one step, or the steps taken and the steps accounted for "
                "would differ. lsg accumulates by itself; use max_physical_batch_size for large batches, and a "
                "DataLoader of your own to look at the data"
            )

    def leave_epoch(self, epoch: int) -> bool:
        if epoch != self._epoch:
            return False
        self.epochs_done += self._begun
        self._epoch, self._micro = None, _ANY_BATCH
        self.gradients.forget_sum()
        return True

    # -- continuation --------------------------------------------------------------------------------------------
    def progress(self) -> "Progress":
        """Where training stands. There must be no batch under way."""
        if self._waiting is not None:
            return self._waiting
        if self.gradients.pending() or (self._epoch is not None and not self._micro.stepped):
            raise PrivacyError("a batch is under way: save the state after its optimizer.step()")
        if self._epoch is None:
            return Progress(self.epochs_done)
        return Progress(self.epochs_done, *self.done, self.gradients.partial_sum())

    def check_idle(self) -> None:
        """Refuse to be moved elsewhere while the loader or a batch counts on the present position."""
        if self._epoch is not None or self.gradients.pending():
            raise PrivacyError("a loop over the loader or a batch is under way: load a state before or after it")

    def resume(self, progress: "Progress") -> None:
        """Go on from there; the next loop over the loader finishes the epoch that was under way."""
        self.gradients.forget_sum()
        self.epochs_done, self._epoch, self._micro, self.done = progress.epochs, None, _ANY_BATCH, (0, 0)
        self._waiting = progress if progress.logical or progress.micro else None
        self._opt_called = True  # torch's schedulers ask whether a step came before theirs: it did, in the saved run

    def close(self) -> None:
        """The engine was detached: nothing may be released any more."""
        self._closed = True


@dataclass(frozen=True)
class Progress:
    """A position between two batches: whole epochs, then of the next one the logical batches that had their step, then
    of the next one the micro-batches, whose clipped gradients are in `partial_sum`."""

    epochs: int
    logical: int = 0
    micro: int = 0
    partial_sum: dict[str, Any] | None = None


@dataclass(frozen=True)
class _MicroBatch:
    """The batch in flight: its number of records, whether it ends its logical batch, whether it has had its step, and
    how many of the records are in the sum already."""

    size: int | None
    last: bool
    stepped: bool
    collected: int = 0

    @property
    def left(self) -> int | None:
        """Records not yet in the sum, where their number is known."""
        return None if self.size is None else self.size - self.collected


_ANY_BATCH = _MicroBatch(size=None, last=True, stepped=False)  # not from our loader: a logical batch of its own
_NO_BATCH = _MicroBatch(size=None, last=False, stepped=True)  # an epoch has begun, its first batch is not out yet
