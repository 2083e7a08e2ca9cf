"""After the first step with a learning rate: did the trained weights move?"""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lsg.errors import PrivacyError


class FirstStep:
    """Holds two numbers of each trained parameter, from before the step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._before = {name: _numbers(p) for name, p in parameters.items()}

    def check(self) -> None:
        """Raise PrivacyError if no trained weight has moved; warn if some have not. Noise alone moves all of them."""
        still = [name for name, p in self._parameters.items() if torch.equal(_numbers(p), self._before[name])]
        if len(still) == len(self._before):
            raise PrivacyError(
                "the first step has moved none of the trained weights, though its noise alone should have: the "
                "optimizer holds other parameters than the model, or the steps are too small for the weights' "
                "precision (keep weights in float32 and set bf16=True)"
            )
        if still:
            names = ", ".join(f"'{name}'" for name in still[:3]) + (", ..." if len(still) > 3 else "")
            warnings.warn(
                f"the first step has not moved {len(still)} of {len(self._before)} trained parameters ({names}): their "
                "precision may be too low for steps so small",
                stacklevel=2,
            )


@torch.no_grad()
def _numbers(parameter: Tensor) -> Tensor:
    exact = parameter.detach().double()
    return torch.stack([exact.sum(), exact.square().sum()])
