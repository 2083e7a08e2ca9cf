"""This rank's clipped sum of a logical batch in, the sum of all ranks' out: one flat all-reduce a logical step.

A few numbers travel behind the sum. By them every rank sees, before anything is released, that all are at the same
step with the same bound and noise, and that each unit that was drawn is in the sum.
"""

from dataclasses import dataclass, replace

import torch

from lsg.distributed.group import Group
from lsg.errors import ReplicaError
from lsg.step.clipping import ClippedSum

_STEPS = 64  # step numbers are compared modulo this: their squares must be exact in float32, for many ranks


@dataclass(frozen=True)
class Place:
    """Where a rank stands when it offers its sum.

    step: the number of the logical step. drawn: units in the logical batch, on all ranks; None where that is not known.
    """

    step: int
    drawn: int | None
    noise_multiplier: float


def sum_over_ranks(own: ClippedSum, place: Place, group: Group) -> ClippedSum:
    """own: the sum of this rank's share, all zero where it had none."""
    if group.alone:
        return own
    step = place.step % _STEPS
    facts = torch.tensor(
        [own.units, float(own.shortened), step, step * step, own.bound, place.noise_multiplier],
        dtype=own.vector.dtype,
    )
    together = group.sum(torch.cat([own.vector, facts.to(own.vector.device)]))
    vector, found = together[: -len(facts)], together[-len(facts) :].tolist()
    units, shortened = round(found[0]), found[1]
    mine = facts.tolist()
    if not (_alike(found[2], mine[2], group) and _alike(found[3], mine[3], group)):
        raise ReplicaError(
            f"rank {group.rank} is at step {place.step} and other ranks are at another one: every rank must iterate "
            "over the loader alike, to its end, and step after each of its batches"
        )
    for name, sum_of_all, value in (
        ("max_grad_norm", found[4], mine[4]),
        ("noise_multiplier", found[5], mine[5]),
    ):
        if not _alike(sum_of_all, value, group):
            raise ReplicaError(
                f"{name} is {value:g} on rank {group.rank} and another on other ranks at step {place.step}: set it "
                "alike on all of them"
            )
    if place.drawn is not None and units != place.drawn:
        raise ReplicaError(
            f"step {place.step}: {place.drawn} units were drawn, but {units} are in the sum of all ranks: a rank lost "
            "part of its share, or made a step without a backward. Nothing of this step was released"
        )
    return replace(own, vector=vector, units=units, shortened=shortened)


def _alike(sum_of_all: float, own: float, group: Group) -> bool:
    return abs(sum_of_all - group.size * own) <= 1e-5 * max(1.0, abs(own)) * group.size
