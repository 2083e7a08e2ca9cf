"""Do all ranks still train the same model? Compared now and then by the bits of weights and the states of streams."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lsg.distributed.group import Group
from lsg.errors import ReplicaError

EVERY = 10  # logical steps between two comparisons

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """replicated: reads the tensors that all ranks must have alike, by what to call them: the trained parameters, say;
    a rank's shard of a weight is its own. streams: the states of the random streams that all ranks share, by
    name; None where a stream has no state."""

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
        for name, found in zip(own, zip(*self._group.everyones(list(own.values())), strict=True), strict=True):
            usual, count = Counter(found).most_common(1)[0]
            others = [rank for rank, value in enumerate(found) if value != usual]
            if others:
                whose = f"rank {others[0]}" if count > 1 else "every rank"
                raise ReplicaError(
                    f"the processes no longer train the same model: {whose} has another {name} than the others, as "
                    f"was seen after step {step} ({EVERY} steps after the last comparison at most). Go on from an "
                    "older checkpoint; a model or an optimizer changed on one rank alone is a likely cause"
                )

    def check_now_and_then(self, step: int) -> None:
        if step == 1 or step % EVERY == 0:
            self.check(step)

    @torch.no_grad()
    def _fingerprints(self) -> dict[str, object]:
        """Sums of the tensors' bits as integers, one kernel each, read at once; hashes of the streams' states."""
        replicated = self._replicated()
        sums = [t.detach().view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64) for t in replicated.values()]
        totals = zip(replicated, torch.stack(sums).tolist() if sums else [], strict=True)
        streams: dict[str, object] = {
            f"state of the {name} stream": _hash(state()) for name, state in self._streams.items()
        }
        return streams | dict(totals)


def _hash(state: Tensor | None) -> str | None:
    return None if state is None else hashlib.sha256(state.cpu().numpy().tobytes()).hexdigest()[:16]
