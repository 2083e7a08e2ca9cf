"""From per-sample gradients to `.grad`: the privacy rules in their order, or non-private gradients without them."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lsg.errors import PrivacyError
from lsg.model.recorder import Recorder
from lsg.sampling.random_sources import NoiseSource
from lsg.step.clipping import ClippedSum, Clipper
from lsg.step.noise import add_noise

LossReduction = Literal["mean", "sum"]


class GradientSource(Protocol):
    """Where gradients of a logical batch come from: micro-batch by micro-batch, then released as one."""

    loss_reduction: LossReduction
    expected_batch_size: int

    def collect(self, expected_size: int | None) -> None:
        """Take in the gradients that the last backward pass left, of so many records if that is known."""

    def drop_pending(self) -> None:
        """Forget gradients that were not collected."""

    def pending(self) -> bool:
        """Whether a backward pass left gradients that were not collected."""

    def renew(self) -> None:
        """A new micro-batch: what an earlier one still computes must not reach it."""

    def left_over(self) -> bool:
        """Whether an earlier micro-batch left gradients that nobody collected or dropped."""

    def forget_sum(self) -> None:
        """Drop what was collected since the last release."""

    def partial_sum(self) -> dict[str, Any] | None:
        """What was collected since the last release, as tensors and numbers. It is not private."""

    def load_partial_sum(self, state: dict[str, Any]) -> None:
        """Go on from what `partial_sum` returned."""

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
        noise: NoiseSource,
    ) -> None:
        self.recorder, self.clipper = recorder, clipper
        self.loss_reduction: LossReduction = loss_reduction
        self.expected_batch_size = expected_batch_size
        self.noise = noise
        self.sum: ClippedSum | None = None

    def pending(self) -> bool:
        return self.recorder.pending

    def drop_pending(self) -> None:
        self.recorder.clear()

    def renew(self) -> None:
        self.recorder.renew()

    def left_over(self) -> bool:
        return self.recorder.left_over

    def forget_sum(self) -> None:
        self.recorder.let_go_subspaces()
        self.sum = None

    def partial_sum(self) -> dict[str, Any] | None:
        return None if self.sum is None else {"vector": self.sum.vector, "bound": self.sum.bound}

    def load_partial_sum(self, state: dict[str, Any]) -> None:
        slots = self.recorder.ready()  # the subspaces that the sum lives in
        like = next(iter(slots.values()))
        self.sum = ClippedSum(state["vector"].to(like.parameter.device), state["bound"])
        self.recorder.hold_subspaces()

    @torch.no_grad()
    def collect(self, expected_size: int | None) -> None:
        if self.recorder.missed:
            raise PrivacyError(
                "between a forward and its backward came a forward of another number of samples, and the gradients of "
                "the first are lost: run forwards that are not for training under torch.no_grad()"
            )
        if not self.recorder.pending:
            return
        size = self.recorder.records
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
        self.recorder.hold_subspaces()
        self.recorder.clear()

    @torch.no_grad()
    def release(self, noise_multiplier: float) -> None:
        self.recorder.ready()
        clipped = self.sum if self.sum is not None else self._empty_sum()
        noisy = add_noise(clipped, noise_multiplier, self.noise)
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
        self.recorder.end_logical_step()

    def _empty_sum(self) -> ClippedSum:
        slots = list(self.recorder.slots.values())
        total = sum(slot.dimensions for slot in slots)
        like = slots[0]
        return ClippedSum(torch.zeros(total, dtype=like.dtype, device=like.parameter.device), self.clipper.bound)


class NonPrivateGradients:
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
        self.loss_reduction: LossReduction = loss_reduction
        self.expected_batch_size = expected_batch_size
        self._sums: list[Tensor] | None = None

    def pending(self) -> bool:
        return any(p.grad is not None for p in self.parameters)

    def drop_pending(self) -> None:
        for p in self.parameters:
            p.grad = None

    def renew(self) -> None:
        self.drop_pending()

    def left_over(self) -> bool:
        return False

    def forget_sum(self) -> None:
        self._sums = None

    def partial_sum(self) -> dict[str, Any] | None:
        return None if self._sums is None else {"gradients": self._sums}

    def load_partial_sum(self, state: dict[str, Any]) -> None:
        self._sums = [s.to(p.device) for s, p in zip(state["gradients"], self.parameters, strict=True)]

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
