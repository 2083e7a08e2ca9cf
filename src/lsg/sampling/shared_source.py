"""Rank 0's random numbers on all ranks: for sources that cannot be drawn from twice."""

import torch
from torch import Tensor

from lsg.distributed.group import Group
from lsg.sampling.secure_source import SecureNoise


class FromFirst:
    """Numbers that rank 0 draws and the others are sent. Each draw is a collective."""

    replayable = False

    def __init__(self, source: SecureNoise, group: Group) -> None:
        self._source, self._group = source, group

    def normal(self, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        if self._group.first:
            return self._group.from_first(self._source.normal(count, device, dtype))
        return self._group.from_first(torch.empty(count, dtype=torch.float64, device=device))

    def uniform(self, count: int) -> Tensor:
        return self._sent(self._source.uniform(count) if self._group.first else None)

    def permutation(self, count: int) -> Tensor:
        return self._sent(self._source.permutation(count) if self._group.first else None)

    def state(self) -> None:
        return None

    def check_state(self, name: str, state: Tensor | None) -> None:
        self._source.check_state(name, state)

    def load_state(self, state: Tensor | None) -> None:
        self._source.load_state(state)

    def renew(self, secret: bytes | None = None) -> None:
        """Every draw is new as it is."""

    def _sent(self, numbers: Tensor | None) -> Tensor:
        """Numbers on the CPU, which nccl cannot send."""
        sent: Tensor = self._group.on_first(lambda: numbers)
        return sent
