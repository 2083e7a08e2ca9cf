"""Weights of one step after another in, their running average out: what a run's noise did to each, it did less to that.

Averages of released weights are post-processing: they cost no privacy.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lsg.errors import ConfigurationError


class WeightAverage:
    """The average of an optimizer's parameters over their last steps, newer ones weighing more.

    It follows every step from here on; frozen parameters are not copied. The newest weights enter step t with weight
    1 / (1 + share * (t - 1)): an exponential average over about `share` of the steps so far, however long the run. 1/9
    is nearly the warm decay (1 + t) / (10 + t) of De et al. 2022; 1 is the plain mean of all steps.

        average = WeightAverage(optimizer, share=0.1)
        ...                         # train
        with average.applied():     # the model has the averaged weights in here, and its own ones afterwards
            evaluate(model)
    """

    def __init__(self, optimizer: Optimizer, share: float) -> None:
        if not 0 < share <= 1:
            raise ConfigurationError(f"share={share!r} of the steps to average over must be more than 0, and at most 1")
        self._share, self._steps = share, 0
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # In half precision the small moves of an average would be rounded away.
        self._averages = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self._parameters
        ]
        optimizer.register_step_post_hook(lambda *_: self._update())

    @torch.no_grad()
    def _update(self) -> None:
        newest = 1 / (1 + self._share * self._steps)
        torch._foreach_lerp_(self._averages, self._current(), newest)
        self._steps += 1

    def _current(self) -> list[Tensor]:
        pairs = zip(self._parameters, self._averages, strict=True)
        return [parameter.detach().to(average.dtype) for parameter, average in pairs]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights within, in the same memory, and its own to the bit after it."""
        own = [parameter.detach().clone() for parameter in self._parameters]
        try:
            self._write(self._averages)
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self._parameters, values)

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-identical continuation needs."""
        return {"share": self._share, "steps": self._steps, "averages": self._averages}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        shapes = [list(average.shape) for average in self._averages]
        if state["share"] != self._share or [list(average.shape) for average in state["averages"]] != shapes:
            raise ConfigurationError("this state is of an average of other parameters, or over another share of steps")
        self._steps = state["steps"]
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.copy_(saved)
