"""The processes that train together: those of torch.distributed's default group, or this one alone.

One code path serves both: at size 1 each method returns what it was given and no collective runs. Every method that
moves something is a collective: all ranks call the same ones in the same order. Each of those begins with a `meet`, in
which ranks that are at different places find out, or follows one that did.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lsg.distributed.ending import in_words, notes_of_this_process
from lsg.distributed.notes import At
from lsg.distributed.waiting import Waiting
from lsg.errors import ConfigurationError, PrivacyError, ReplicaError

_RAISED = "raised"
_T = TypeVar("_T")
_PLACE, _NUMBERS = 48, 4  # bytes of a place's name, and numbers, that a meeting exchanges


class _World:
    """torch.distributed's default group, a group for small messages that need no GPU, and how to wait in both."""

    def __init__(self) -> None:
        self.whole = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        notes = notes_of_this_process()
        assert notes is not None
        self.waiting = Waiting(notes, self.rank)
        # gloo connects each process with each: who is not there yet is waited for here, where notes are read.
        there = torch.zeros(1, device="cpu" if "gloo" in str(dist.get_backend_config()) else "cuda")
        self.waiting.done(dist.all_reduce(there, async_op=True), self.whole, "the other ranks' make_private", At())
        self.control = dist.new_group(backend="gloo")
        self.runs = 0

    def of(self, tensor: Tensor) -> Any:
        """The group that moves this tensor: nccl has nothing for the CPU."""
        return self.control if tensor.device.type == "cpu" else self.whole

    _present: "_World | None" = None

    @classmethod
    def present(cls) -> "_World":
        if cls._present is None or cls._present.whole is not dist.group.WORLD:
            cls._present = cls()
        return cls._present


class Group:
    """rank: the number of this process, from 0. size: how many there are."""

    def __init__(self, world: _World | None = None) -> None:
        self.rank, self.size = (world.rank, world.size) if world else (0, 1)
        self._world, self._at, self._loops = world, At(), 0
        if world is not None:
            world.runs += 1
            self._at = At(world.runs)
            world.waiting.notes.begin()

    @classmethod
    def current(cls) -> "Group":
        """Of the process group that the user began; this process alone where there is none."""
        return cls(_World.present()) if _several() else cls()

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the files."""
        return self.rank == 0

    def check(self) -> None:
        """Refuse to go on with other processes than those that `make_private` found."""
        if self._world is None and _several():
            raise PrivacyError(
                f"torch.distributed was initialised with {dist.get_world_size()} processes after make_private, which "
                "found this one alone: call init_process_group before make_private"
            )
        if self._world is not None and not (dist.is_initialized() and self._world.whole is dist.group.WORLD):
            raise PrivacyError(
                f"the process group of {self.size} processes that make_private found is gone: call "
                "destroy_process_group after the training, and make_private anew after another init_process_group"
            )

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Wait for all ranks, and see that they are at the same place. Returns each rank's numbers, 4 at most."""
        if self._world is None:
            return [list(numbers)]
        self.check()
        self._world.waiting.check()
        self._world.waiting.notes.comes()
        name = place.encode()[:_PLACE].ljust(_PLACE)
        padded = [*numbers, *[0] * (_NUMBERS - len(numbers))]
        own = torch.frombuffer(bytearray(name + struct.pack(f"{_NUMBERS}q", *padded)), dtype=torch.uint8)
        found = [part.numpy().tobytes() for part in self._gathered(own, place)]
        places = [part[:_PLACE].decode(errors="replace").strip() for part in found]
        if len(set(places)) > 1:
            other = next(rank for rank, where in enumerate(places) if where != places[self.rank])
            raise ReplicaError(
                f"the processes are at different places: rank {self.rank} at {place}, rank {other} at {places[other]}. "
                "Every rank must run the same loops over the loader, to their ends, and step after each batch"
            )
        return [list(struct.unpack(f"{_NUMBERS}q", part[_PLACE:])[: len(numbers)]) for part in found]

    def sum(self, vector: Tensor) -> Tensor:
        """The sum of all ranks' vectors, equal to the bit on all of them. They have just met."""
        if self._world is None:
            return vector
        total = vector.clone()
        group = self._world.of(total)
        self._done(dist.all_reduce(total, group=group, async_op=True), group, "the sum of a logical batch")
        return total

    def from_first(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, written into this one. They have just met."""
        if self._world is not None:
            sent = tensor.detach().contiguous()  # a collective wants memory without gaps, and not any kind of number
            group = self._world.of(sent)
            work = dist.broadcast(sent.flatten().view(torch.uint8), src=0, group=group, async_op=True)
            self._done(work, group, "a tensor of rank 0")
            if sent.data_ptr() != tensor.data_ptr() and not self.first:
                tensor.copy_(sent)
        return tensor

    def everyones(self, value: Any, place: str = "an exchange of values") -> list[Any]:
        """What each rank gave, in the order of the ranks. Small plain values."""
        if self._world is None:
            return [value]
        message = _bytes(value)
        sizes = [size for (size,) in self.meet(place, [len(message)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(message)] = message
        found = self._gathered(padded, place)
        return [_value(part[:size]) for part, size in zip(found, sizes, strict=True)]

    def any(self, flag: bool, place: str) -> bool:
        """Whether any rank says so. Nothing waits for a GPU."""
        return any(said for (said,) in self.meet(place, [int(flag)]))

    def on_first(self, work: Callable[[], Any], place: str = "what rank 0 does alone") -> Any:
        """Have rank 0 alone do this; all ranks get its result, or raise what it raised."""
        if self._world is None:
            return work()
        message = torch.empty(0, dtype=torch.uint8)
        if self.first:
            try:
                message = _bytes(work())
            except Exception as error:
                message = _bytes((_RAISED, _picklable(error, self.rank)))
        size = self.meet(place, [len(message)])[0][0]
        if not self.first:
            message = torch.empty(size, dtype=torch.uint8)
        control = self._world.control
        self._done(dist.broadcast(message, src=0, group=control, async_op=True), control, place)
        answer = _value(message)
        if isinstance(answer, tuple) and answer[:1] == (_RAISED,):
            raise answer[1]
        return answer

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
        found = self.everyones(dict(values), "a comparison of what all ranks were given")
        for name in dict.fromkeys(name for given in found for name in given):
            for rank, other in enumerate(found):
                if other.get(name) != found[0].get(name):
                    raise ConfigurationError(
                        f"{name} differs between the processes: {found[0].get(name)!r} on rank 0, "
                        f"{other.get(name)!r} on rank {rank}. {remedy}"
                    )

    def loop(self) -> "_Loop":
        """A loop over the loader; where it ends before its end, the others are told."""
        return _Loop(self)

    def tell(self, error: Exception) -> None:
        """Leave the others a note that this rank raised an error: if it does not come all the same, they end."""
        if self._world is not None:
            self._world.waiting.notes.raised(self._at, in_words(error))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error in here is told."""
        try:
            yield
        except Exception as error:
            self.tell(error)
            raise

    def _gathered(self, own: Tensor, place: str) -> list[Tensor]:
        assert self._world is not None
        found = [torch.empty_like(own) for _ in range(self.size)]
        control = self._world.control
        self._done(dist.all_gather(found, own, group=control, async_op=True), control, place)
        return found

    def _done(self, work: Any, group: Any, what: str) -> None:
        assert self._world is not None
        self._world.waiting.done(work, group, what, self._at)


class _Loop:
    """While it is open, this rank can be expected at the loop's meetings."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        group = self._group
        group._loops += 1
        self._at = group._at = group._at._replace(loop=group._loops)
        if group._world is not None:
            group._world.waiting.notes.loops()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        group = self._group
        if group._at != self._at:
            return  # a newer one has begun
        group._at = group._at._replace(loop=None)
        if group._world is not None and error is not None:
            left = isinstance(error, GeneratorExit)
            why = "it left its loop over the loader before the end" if left else in_words(error)
            group._world.waiting.notes.left(self._at, why)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _bytes(value: Any) -> Tensor:
    found: Tensor = dist.distributed_c10d._object_to_tensor(value, torch.device("cpu"), None)[0]
    return found


def _value(message: Tensor) -> Any:
    """As torch.distributed's own object collectives read them: ranks of one run trust each other."""
    return dist.distributed_c10d._tensor_to_object(message.contiguous(), message.numel(), None)


def _picklable(error: Exception, rank: int) -> Exception:
    """The error, or its words where it cannot travel."""
    try:
        _value(_bytes(error))
    except Exception:
        return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
    return error
