"""Constants that a model writes as `torch.tensor(...)` are filled, not copied from the host."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lsg.speed.device_constants import without_host_constants


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def constants(x: Tensor) -> list[Tensor]:
    made: Any = torch.tensor
    zero = made(0.0, device=x.device, dtype=x.dtype)
    return [zero, made(True), made(3), made(2.5), made(1.5, requires_grad=True)]


def test_scalars_are_the_same_and_need_no_copy() -> None:
    x = torch.ones(3, dtype=torch.float64)
    with Operations() as plain:
        expected = constants(x)
    with Operations() as filled:
        found = without_host_constants(constants)(x)
    assert "aten::lift_fresh" in plain.names  # what torch.tensor does with a copy from the host
    assert "aten::lift_fresh" not in filled.names
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
        assert (a.dtype, a.device, a.requires_grad) == (b.dtype, b.device, b.requires_grad)


def test_what_is_no_scalar_is_left_alone() -> None:
    made = without_host_constants(lambda: torch.tensor([1, 2]))()
    assert torch.equal(made, torch.tensor([1, 2]))
    assert without_host_constants(lambda: torch.tensor(np.float64(1.5)))().dtype == torch.float64
