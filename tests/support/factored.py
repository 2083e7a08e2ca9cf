"""The switch that makes dense weights leave factors, on a CPU too and whatever their size."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from lsg.parameters import outer


@contextmanager
def factored(on: bool = True) -> Iterator[list[int]]:
    """Every linear layer with a dense weight keeps its input and its output's gradient. Gives the outputs of each such
    call."""
    seen: list[int] = []

    def is_faster(x: Tensor, outputs: int) -> bool:
        seen.append(outputs)
        return on

    with mock.patch.object(outer, "is_faster", is_faster):
        yield seen
