"""One attack: how to build the model, what it is fed with, and how the user trains it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lsg import DPSGD
from lsg.methods import Method
from tests.adversarial.records import Batch


def squares(output: Any, batch: Batch, reduction: str) -> Tensor:
    """The default loss: each record's squared outputs, then their sum or mean over the records."""
    found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    each = torch.stack([t.reshape(batch.size, -1).square().sum(1) for t in found]).sum(0)
    return each.mean() if reduction == "mean" else each.sum()


def call_model(model: nn.Module, batch: Batch) -> Any:
    return model(*batch.args, **batch.kwargs)


@dataclass(frozen=True)
class Trial:
    """build: a fresh model, the same at every call. loss: (output, batch, "sum" or "mean") -> a number.

    modes: training mode (or not) at each batch; always training where empty. stateful: the model remembers something
    that is not in a buffer, so references need a model of their own for each record.
    """

    build: Callable[[], nn.Module]
    batches: Sequence[Batch]
    method: Method = DPSGD()  # noqa: RUF009  (frozen)
    reduction: str = "sum"
    loss: Callable[[Any, Batch, str], Tensor] = squares
    call: Callable[[nn.Module, Batch], Any] = call_model
    modes: Sequence[bool] = ()
    stateful: bool = False
    own_loss: bool = False  # the model computes its loss, and lsg puts another one there: outputs are not compared
    bound: float = 0.5  # max_grad_norm: small, so that clipping is at work
    tolerance: float = 1e-7  # relative; for float64 models
    seed: int = 0

    @property
    def all_modes(self) -> list[bool]:
        return list(self.modes) or [True] * len(self.batches)
