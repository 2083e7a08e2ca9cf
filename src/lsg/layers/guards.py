"""What watches a private model beside its rules, put on in one go and taken off again at detach."""

from torch import nn

from lsg.layers.batch_norm import watch_batch_norms
from lsg.layers.model_losses import ModelLosses
from lsg.losses import Reduction


class Guards:
    """From `make_private` to `detach`: refuses what would break the guarantee when it happens."""

    def __init__(self, model: nn.Module, trained: list[nn.Parameter], loss_reduction: Reduction) -> None:
        self._losses = ModelLosses(model, loss_reduction)
        self._handles = watch_batch_norms(model)

    def remove(self) -> None:
        self._losses.remove()
        for handle in self._handles:
            handle.remove()
