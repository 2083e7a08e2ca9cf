"""The logical batch is complete on this rank: do all ranks agree on it, and is each unit in the sum?

Ranks meet once a logical step, before their sums are added and anything is released. A few numbers are exchanged: a
hash of all that ranks must have alike, and how many units each has.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lsg.distributed.group import Group
from lsg.errors import PrivacyError, ReplicaError

_NOT_KNOWN = -1


@dataclass(frozen=True)
class Place:
    """Where a rank stands when it offers its sum.

    step: the number of the logical step. alike: by name, what all ranks must have alike; asked for when the step's
    subspaces are made. drawn: units in the logical batch, on all ranks; share: those of this rank; None where that is
    not known.
    """

    step: int
    alike: Callable[[], dict[str, Any]]
    drawn: int | None
    share: int | None


def of_all_ranks(units: int | None, bound: float, place: Place, group: Group) -> tuple[int, float]:
    """units: those in this rank's sum, None where they are not counted. bound: the sum's sensitivity.

    Returns the units in the sums of all ranks, and the largest bound: a unit is in one rank's sum alone, so that bound
    holds for the whole sum."""
    group.check()
    if group.alone:
        return units or 0, bound
    if place.share is None:
        raise PrivacyError(
            f"a step on a batch that the private loader did not hand out, with {group.size} processes: which of them "
            "has which records is not known, and one that several have would count several times. Iterate over the "
            "loader that make_private returned"
        )
    own = _NOT_KNOWN if units is None else units
    found = _compared(place, group, [own, place.share, _bits(bound)])
    for rank, (got, wanted, _) in enumerate(found):
        if got not in (wanted, _NOT_KNOWN):
            raise ReplicaError(
                f"step {place.step}: {got} units are in the sum of rank {rank}, whose share of the {place.drawn} drawn "
                f"is {wanted}: a micro-batch was stepped without a backward, or twice. Nothing of this step was "
                "released"
            )
    return sum(max(counted, 0) for counted, *_ in found), max(_number(bits) for *_, bits in found)


def still_alike(place: Place, group: Group) -> None:
    """A step that was refused after the exchange (by a budget, a full disk) is tried again: see that ranks agree on it
    still. With another noise multiplier each, their releases together would tell the sum."""
    _compared(place, group, [])


def _compared(place: Place, group: Group, numbers: list[int]) -> list[list[int]]:
    """Wait for all ranks, and refuse what they do not have alike. Returns each rank's numbers."""
    alike = place.alike()
    digest = int.from_bytes(hashlib.sha256(repr(sorted(alike.items())).encode()).digest()[:8], "big") >> 1
    found = group.meet(f"step {place.step}", [digest, *numbers])
    if len({digest for digest, *_ in found}) > 1:
        _name_what_differs(alike, place.step, group)
    return [others for _, *others in found]


def _bits(number: float) -> int:
    """A number as a whole one that stands for it exactly."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


def _name_what_differs(alike: dict[str, Any], step: int, group: Group) -> None:
    found = group.everyones({name: repr(value) for name, value in alike.items()}, f"what differs at step {step}")
    for name in alike:
        values = [own.get(name) for own in found]
        usual = Counter(values).most_common(1)[0][0]
        for rank, value in enumerate(values):
            if value != usual:
                other = values.index(usual)
                raise ReplicaError(
                    f"{name} differs between the processes at step {step}: {value} on rank {rank}, {usual} on rank "
                    f"{other}. Nothing of this step was released. Every rank must go through the same loops, settings "
                    "and schedules; a rank without a share of a step has no batch, so that what is done once a step, a "
                    "schedule say, belongs into optimizer.on_logical_step(...)"
                )
    raise ReplicaError(f"the processes differ at step {step}, and what differs could not be found")
