"""The processes that train together: those of torch.distributed's default group, or this one alone.

One code path serves both: at size 1 each method returns what it was given and no collective runs. Every method but
the properties is a collective: all ranks call the same ones in the same order.
"""

import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lsg.distributed.ending import lost, tell_reasons
from lsg.errors import ConfigurationError

_RAISED = "raised"
_T = TypeVar("_T")


class Group:
    """rank: the number of this process, from 0. size: how many there are."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._control: Any = None  # a group for small messages that need no GPU
        if size > 1:
            self._control = _control_group()
            tell_reasons(rank)

    @classmethod
    def current(cls) -> "Group":
        """Of the process group that the user began; this process alone where there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the files."""
        return self.rank == 0

    def sum(self, vector: Tensor) -> Tensor:
        """The sum of all ranks' vectors, equal to the bit on all of them."""
        if self.alone:
            return vector
        total = vector.clone()
        with lost(self.rank, "the sum of a logical batch"):
            dist.all_reduce(total)
        return total

    def from_first(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, written into this one."""
        if not self.alone:
            with lost(self.rank, "a tensor of rank 0"):
                dist.broadcast(tensor, src=0)
        return tensor

    def everyones(self, value: Any) -> list[Any]:
        """What each rank gave, in the order of the ranks. Small plain values."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        with lost(self.rank, "what the other ranks have"):
            dist.all_gather_object(values, value, group=self._control)
        return values

    def any(self, flag: bool) -> bool:
        """Whether any rank says so. Nothing waits for a GPU."""
        if self.alone:
            return flag
        found = torch.tensor([float(flag)])
        with lost(self.rank, "what the other ranks have"):
            dist.all_reduce(found, group=self._control)
        return bool(found.item())

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Have rank 0 alone do this; all ranks get its result, or raise what it raised."""
        if self.alone:
            return work()
        answer: list[Any] = [None]
        if self.first:
            try:
                answer = [work()]
            except Exception as error:
                answer = [(_RAISED, _picklable(error, self.rank))]
        with lost(self.rank, "what rank 0 has to say"):
            dist.broadcast_object_list(answer, src=0, group=self._control)
        if isinstance(answer[0], tuple) and answer[0][:1] == (_RAISED,):
            raise answer[0][1]
        return answer[0]

    def together(self, work: Callable[[], _T]) -> _T:
        """Have every rank do this; where it fails on one, all raise what the first of them raised. No collective may
        run in it."""
        if self.alone:
            return work()
        result, own = None, None
        try:
            result = work()
        except Exception as error:
            own = error
        for rank, found in enumerate(self.everyones(None if own is None else _picklable(own, self.rank))):
            if found is not None:
                raise own if rank == self.rank and own is not None else found
        return cast("_T", result)

    def first_then_others(self, work: Callable[[], _T]) -> _T:
        """The same, by rank 0 before the others: what it downloads they find on the disk."""
        if self.alone:
            return work()
        made = self.together(lambda: work() if self.first else None)
        found = self.together(lambda: None if self.first else work())
        return cast("_T", made if self.first else found)

    def check_alike(self, values: Mapping[str, Any], remedy: str) -> None:
        """Refuse values, by name, that are not the same on all ranks."""
        if self.alone:
            return
        found = self.everyones(dict(values))
        for name in values:
            for rank, other in enumerate(found):
                if other.get(name) != found[0].get(name):
                    raise ConfigurationError(
                        f"{name} differs between the processes: {found[0].get(name)!r} on rank 0, "
                        f"{other.get(name)!r} on rank {rank}. {remedy}"
                    )


def _control_group() -> Any:
    """The default group where its backend takes CPU tensors, a gloo group beside it otherwise."""
    backends = dist.get_backend_config() if hasattr(dist, "get_backend_config") else dist.get_backend()
    return None if "gloo" in str(backends) else dist.new_group(backend="gloo")


def _picklable(error: Exception, rank: int) -> Exception:
    """The error, or its words where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
    return error
