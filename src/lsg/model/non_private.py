"""What non-private training has in place of a recorder: the size of the last batch, and the same fast forward."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lsg.distributed.sharded_model import ShardedModel
from lsg.distributed.wrapper import refuse_later_wrapper
from lsg.model.inputs import batch_size
from lsg.parameters.factored_calls import Calls
from lsg.perf import PerfConfig
from lsg.speed.fast_forward import FastForward
from lsg.speed.tape import CudaTape


class ParameterAsSlot:
    """A parameter where a recording looks for a slot: what it computes is the parameter's own gradient."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.calls = Calls()  # never any

    @property
    def carriers(self) -> tuple[Tensor, ...]:
        return (self.parameter,)

    @property
    def pending(self) -> bool:
        return self.parameter.grad is not None

    def apart(self) -> AbstractContextManager[tuple[Tensor, ...]]:
        return nullcontext(self.carriers)


class Scaled(Protocol):
    """Whose gradients are sums over records."""

    @property
    def scale(self) -> float:
        """What the gradient of a micro-batch's loss is multiplied with; zero for one of which nothing is kept."""


def _scaled(gradient: Tensor, scale: float) -> Tensor:
    return gradient * scale if scale else torch.zeros_like(gradient)


class NonPrivateModel:
    """Attached to a model that is trained without privacy, until `detach`."""

    def __init__(self, model: nn.Module, trained: Sequence[nn.Parameter], perf: PerfConfig) -> None:
        self._size = 1
        self._handles = [model.register_forward_pre_hook(self._note, with_kwargs=True)]
        self._trained = trained
        self.fast: FastForward | None = None
        device = trained[0].device.type
        if perf.fast(device):
            tape = CudaTape() if perf.graphs(device) else None
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            slots = [ParameterAsSlot(names.get(id(p), "a parameter"), p) for p in trained]
            self.fast = FastForward(model, slots, compiled=perf.compiles, tape=tape)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            refuse_later_wrapper()
            self._size = batch_size((args, kwargs)) or 1

    def scale_before_average(self, sharded: ShardedModel, gradients: Scaled) -> None:
        """From now on each rank's gradients of gathered parameters are scaled before FSDP2 averages them over ranks, so
        that the average is the sum over the records of all."""
        ranks = sharded.group.size
        for parameter in self._trained:
            gathered = sharded.gathered(parameter)
            if gathered is not None:
                self._handles.append(gathered.register_hook(lambda grad: _scaled(grad, ranks * gradients.scale)))

    def size(self) -> int:
        """How many samples the last forward had."""
        return self._size

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.fast is not None:
            self.fast.remove()
