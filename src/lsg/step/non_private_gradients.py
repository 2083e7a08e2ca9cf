"""Non-private gradients in the same loop as private ones: summed over a logical batch, divided by the expected size."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lsg.distributed.group import Group
from lsg.distributed.sharding import is_sharded
from lsg.errors import ConfigurationError
from lsg.step.exchange import Place, of_all_ranks, still_alike
from lsg.step.gradients import LossReduction, drop_gradients
from lsg.step.signals import StepSignals


class NonPrivateGradients:
    """Non-private training in the same loop: the sum of ordinary gradients, over the expected batch size.

    Of sharded parameters FSDP2 averages gradients over the ranks in each backward. There each rank's own part is scaled
    before (`scale`), so that the average is the sum over all ranks' records.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        micro_batch_size: Callable[[], int],
        *,
        loss_reduction: LossReduction,
        expected_batch_size: int,
        views: int = 1,
        group: Group | None = None,
    ) -> None:
        self._views, self._group = views, group or Group()
        self.parameters = list(parameters)
        self.micro_batch_size = micro_batch_size
        self.loss_reduction: LossReduction = loss_reduction
        self.expected_batch_size = expected_batch_size
        self._sums: list[Tensor] | None = None
        self._whole = False  # whether the sums are already those of all ranks
        self._filler = False
        self.signals: StepSignals | None = None

    def pending(self) -> bool:
        return any(p.grad is not None for p in self.parameters)

    def drop_pending(self) -> None:
        drop_gradients(self.parameters)

    def renew(self) -> None:
        self.drop_pending()

    def note_filler(self, filler: bool) -> None:
        self._filler = filler

    @property
    def scale(self) -> float:
        """What this rank's mean (or sum) over the micro-batch is multiplied with, for the sum over the records."""
        if self._filler:
            return 0.0
        # The mean over a record's views, as in private training.
        return (self.micro_batch_size() if self.loss_reduction == "mean" else 1) / self._views

    def left_over(self) -> bool:
        return False

    def forget_sum(self) -> None:
        self._sums, self._whole = None, False

    def partial_sum(self) -> dict[str, Any] | None:
        if self._sums is not None and any(is_sharded(total) for total in self._sums):
            raise ConfigurationError(
                "NonPrivate with sharded weights: a state in the middle of a logical batch would hold a whole "
                "gradient; save after a batch with optimizer.stepped"
            )
        return None if self._sums is None else {"gradients": self._sums}

    def load_partial_sum(self, state: dict[str, Any]) -> None:
        self._sums = [s.to(p.device) for s, p in zip(state["gradients"], self.parameters, strict=True)]

    @torch.no_grad()
    def collect(self, expected_size: int | None, unit_rows: Sequence[int] | None = None) -> None:
        if not self.pending():
            return
        parts = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() if is_sharded(p) else p.grad * self.scale
            for p in self.parameters
        ]
        self._sums = parts if self._sums is None else [s + g for s, g in zip(self._sums, parts, strict=True)]
        self.drop_pending()

    @torch.no_grad()
    def exchange(self, place: Place) -> None:
        if self._whole:  # a step that was refused after the exchange is tried again
            still_alike(place, self._group)
            return
        of_all_ranks(None, 0.0, place, self._group)
        if self._group.alone:
            return
        sums = self._sums or [torch.zeros_like(p) for p in self.parameters]
        mine = [number for number, p in enumerate(self.parameters) if not is_sharded(p)]
        if mine:
            whole = self._group.sum(torch.cat([sums[number].flatten() for number in mine]))
            for number, share in zip(mine, whole.split([sums[number].numel() for number in mine]), strict=True):
                sums[number] = share.view(sums[number].shape)
        self._sums, self._whole = sums, True

    @torch.no_grad()
    def release(self, noise_multiplier: float) -> None:
        divisor = self.expected_batch_size if self.loss_reduction == "mean" else 1
        sums = self._sums or [torch.zeros_like(p) for p in self.parameters]
        for p, total in zip(self.parameters, sums, strict=True):
            p.grad = total / divisor
        self._sums, self._whole = None, False
