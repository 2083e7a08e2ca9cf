"""What graphs are made of: an operation takes h, (B, F) or (B, T, F), and gives back the same shape.

`clean` operations keep records apart, in layouts that invite mistakes about which dimension is the record; `mixing`
ones (mixing.py) do not keep them apart. Which is which is only a label: the oracle finds out by itself.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Of a graph: features F and positions T. The numbers may coincide with each other and with the batch size."""

    F: int
    T: int


class Op(nn.Module):
    """Base of all operations. `mask` is None, (1, T) or (B, T), True where a position counts."""

    dims: tuple[int, ...] = (2, 3)  # of h, that it can take

    def __init__(self, sizes: Sizes, rng: random.Random) -> None:
        super().__init__()
        self.sizes = sizes
        self.make(sizes.F, sizes.T, rng)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        """Make the layers."""

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError


CLEAN: dict[str, type[Op]] = {}
MIXING: dict[str, type[Op]] = {}


def clean(kind: type[Op]) -> type[Op]:
    CLEAN[kind.__name__] = kind
    return kind


def mixing(kind: type[Op]) -> type[Op]:
    MIXING[kind.__name__] = kind
    return kind


def layer_op(*dims: int) -> Callable[[Callable[[nn.Module, Tensor], Tensor]], type[Op]]:
    """Makes an operation of a way to call one linear layer (or one norm) on h."""

    def register(way: Callable[[nn.Module, Tensor], Tensor]) -> type[Op]:
        class Way(Op):
            def make(self, F: int, T: int, rng: random.Random) -> None:
                self.layer = nn.Linear(F, F) if rng.random() < 0.7 else nn.LayerNorm(F)

            def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
                return way(self.layer, h)

        Way.dims, Way.__name__ = dims or (2, 3), "".join(part.title() for part in way.__name__.split("_"))
        return clean(Way)

    return register
