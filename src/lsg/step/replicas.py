"""Do all ranks still train the same model? Compared now and then by the bits of weights and the states of streams."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from lsg.distributed.group import Group
from lsg.errors import ReplicaError

EVERY = 10  # logical steps between two comparisons

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """replicated: reads the tensors that all ranks must have alike, by what to call them: the model's parameters,
    trained or not; a rank's shard of a weight is its own. streams: the states of the random streams that all ranks
    share, by name; None where a stream has no state."""

    def __init__(
        self,
        group: Group,
        replicated: Callable[[], Mapping[str, Tensor]],
        streams: Mapping[str, Callable[[], Tensor | None]],
    ) -> None:
        self._group, self._replicated, self._streams = group, replicated, streams

    def check(self, step: int) -> None:
        """Raise ReplicaError, naming a rank and what it has that others have not. Every rank has to call this."""
        if self._group.alone:
            return
        own = self._fingerprints()
        everyones = self._group.everyones(list(own.values()), f"the comparison after step {step}")
        for name, found in zip(own, zip(*everyones, strict=True), strict=True):
            usual, count = Counter(found).most_common(1)[0]
            others = [rank for rank, value in enumerate(found) if value != usual]
            if others:
                whose = f"rank {others[0]} has" if count > 1 else "each rank has"
                raise ReplicaError(
                    f"the processes no longer train the same model: {whose} another {name} than the others, as "
                    f"was seen after step {step} ({EVERY} steps after the last comparison at most). Go on from an "
                    "older checkpoint; a model or an optimizer changed on one rank alone is a likely cause"
                )

    def check_now_and_then(self, step: int) -> None:
        if step == 1 or step % EVERY == 0:
            self.check(step)

    def streams(self) -> dict[str, str | None]:
        """A hash of each stream's state."""
        return {f"state of the {name} stream": _hash(state()) for name, state in self._streams.items()}

    @torch.no_grad()
    def _fingerprints(self) -> dict[str, object]:
        """Of the streams, and of the bits of each tensor as integers: two sums, read at once for all of them."""
        replicated = self._replicated()
        sums = [part for tensor in replicated.values() for part in _sums(tensor)]
        read = iter(torch.stack(sums).tolist() if sums else [])
        return self.streams() | {name: (next(read), next(read)) for name in replicated}


def settings_of(optimizer: Optimizer) -> list[dict[str, object]]:
    """Numbers, words and switches of its groups: the learning rate, say."""
    groups: list[dict[str, object]] = []
    for group in optimizer.param_groups:
        plain = {name: value.item() if _is_number(value) else value for name, value in group.items()}
        groups.append({n: v for n, v in plain.items() if v is None or isinstance(v, int | float | str | bool | tuple)})
    return groups


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _sums(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers that change with any number of the weight, and when two of them change places: rows weighted by their
    place, and columns by theirs."""
    bits = weight.detach().contiguous().flatten()
    bits = bits.view(_INTEGERS[weight.element_size()]) if weight.element_size() in _INTEGERS else bits.view(torch.int8)
    rows = max(1, weight.shape[0] if weight.dim() > 1 else math.isqrt(bits.numel()))
    whole = bits.numel() // rows * rows
    table, rest = bits[:whole].view(rows, whole // rows), bits[whole:]
    by_row, by_column = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    return _weighted(torch.cat([by_row, rest.long()])), _weighted(by_column)


def _weighted(numbers: Tensor) -> Tensor:
    return (numbers * torch.arange(1, 2 * numbers.numel(), 2, device=numbers.device)).sum()


def _hash(state: Tensor | None) -> str | None:
    return None if state is None else hashlib.sha256(state.cpu().numpy().tobytes()).hexdigest()[:16]
