"""Calls of a dense weight matrix: the input and the output's gradient of each, in place of the product of both.

The output of a call gets a carrier of its own, a zero-valued term of y = x W^T: autograd leaves dloss/dy there, in its
`.grad`, as it does with any leaf. The layer's backward adds the input that belongs to it.

Shapes: B = samples, T = tokens, I = inputs, O = outputs.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lsg.errors import PrivacyError
from lsg.parameters.outer import OuterProducts


@dataclass(frozen=True, eq=False)
class Input:
    """What a call multiplied its weight with. The version tells whether that was written to since."""

    x: Tensor  # (B, T, I)
    version: int
    stored_inputs_first: bool  # of the weight: (in, out) in place of (out, in)


class Call:
    """One call of a layer, between its forward and its backward."""

    def __init__(self, carrier: Tensor, calls: "Calls", stored_inputs_first: bool) -> None:
        self.carrier, self._calls, self._stored_inputs_first = carrier, calls, stored_inputs_first

    def keep(self, x: Tensor) -> None:
        """From the backward: this is the input, (B, T, in). The gradient arrives in the carrier."""
        self._calls.inputs[self.carrier] = Input(x.detach(), x._version, self._stored_inputs_first)


class Calls:
    """The calls of one weight that belong to one generation of its carriers.

    made: with `remember`, the carriers of all calls that began. Otherwise a call is known from its backward on.
    """

    def __init__(self, *, remember: bool = False) -> None:
        self.inputs: dict[Tensor, Input] = {}  # by the carrier of the output
        self.made: list[Tensor] | None = [] if remember else None

    def begin(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, stored_inputs_first: bool
    ) -> Call:
        """A call whose output has this shape."""
        carrier = zeros(shape, dtype, device)
        if self.made is not None:
            self.made.append(carrier)
        return Call(carrier, self, stored_inputs_first)

    @property
    def pending(self) -> bool:
        return any(carrier.grad is not None for carrier in self.inputs)

    def clear(self) -> None:
        for carrier in self.inputs:
            carrier.grad = None
        self.inputs.clear()

    def products(self, name: str) -> OuterProducts | None:
        """Per-sample gradients of the weight, in all calls together; None without a gradient."""
        pairs = [(i, carrier.grad) for carrier, i in self.inputs.items() if carrier.grad is not None]
        if not pairs:
            return None
        rows, columns = [], []
        for call, gradient in pairs:
            if call.x._version != call.version:
                raise PrivacyError(
                    f"an input of the layer with '{name}' was changed in place between backward() and step(): its "
                    "gradient would mix two batches. Change it after the step, or give the model a copy"
                )
            g_BTO = gradient.reshape(gradient.shape[0], -1, gradient.shape[-1])
            pair = (call.x, g_BTO) if call.stored_inputs_first else (g_BTO, call.x)
            rows.append(pair[0])
            columns.append(pair[1])
        # g1^T x1 + g2^T x2 is the product of all tokens of both calls.
        return OuterProducts(_join(rows), _join(columns))


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A carrier: a leaf that takes no memory."""
    return _zero(dtype, device).expand(shape).requires_grad_()


@lru_cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The one number in memory behind all carriers: a fill for each of them would cost a kernel launch each."""
    return torch.zeros((), dtype=dtype, device=device)
