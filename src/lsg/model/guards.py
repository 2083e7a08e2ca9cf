"""What watches a private model beside its rules, put on in one go and taken off again at detach."""

import weakref
from typing import Any

import torch
from torch import nn

from lsg.distributed.sharded_model import ShardedModel
from lsg.distributed.wrapper import refuse_later_wrapper
from lsg.losses import Reduction
from lsg.model.attachment import Attachment
from lsg.model.batch_norm_watch import watch_batch_norms
from lsg.model.hooks import Hook
from lsg.model.model_losses import ModelLosses
from lsg.model.outside_losses import LossWatch
from lsg.model.parameters_in_place import ParametersInPlace
from lsg.model.scaled_positions import watch_scaled_positions
from lsg.model.several_forwards import SeveralForwards
from lsg.model.trained_fronts import TrainedFronts
from lsg.sampling.clock import Clock


class Guards:
    """From `make_private` to `detach`: refuses what would break the guarantee when it happens."""

    def __init__(
        self,
        attachment: Attachment,
        clock: Clock,
        trained: list[nn.Parameter],
        loss_reduction: Reduction,
        sharded: ShardedModel | None = None,
    ) -> None:
        model = attachment.model
        self.parameters = ParametersInPlace(model, trained, sharded)
        self._losses = ModelLosses(model, loss_reduction)
        self._loss_watch, self._forwards, self._fronts = LossWatch(loss_reduction), SeveralForwards(), TrainedFronts()
        self._attachment, self._clock = weakref.ref(attachment), weakref.ref(clock)
        self._handles = [
            model.register_forward_pre_hook(Hook(self._before), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self._after)),
            *watch_batch_norms(model),
            *watch_scaled_positions(model),
        ]

    def remove(self) -> None:
        self._losses.remove()
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        clock = self._clock()
        if torch.is_grad_enabled() and clock is not None:
            refuse_later_wrapper()
            self.parameters.check()
            batch = clock.batch_in_flight
            self._forwards.note((args, kwargs), batch, None if batch is None else batch.left)
            self._fronts.note((args, kwargs), clock.batch)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        attachment = self._attachment()
        if attachment is not None:
            self._loss_watch.watch(output, attachment.batch.records)
