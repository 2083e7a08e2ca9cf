"""A canary under watch: how far it moves the clipped sum, and along which direction of a release to look for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lsg.audit.canaries import Canary
from lsg.audit.observations import TOLERANCE, Sensitivity
from lsg.audit.rig import MAX_GRAD_NORM, Record, Rig, blank

SCALES = (1e-6, 1e-3, 1.0, 1e3)  # of the canaries' gradients, for the sensitivity alone


class Lift:
    """How a sum becomes gradients, and which sum best explains a gradient."""

    def __init__(self, rig: Rig) -> None:
        self.matrix = rig.lift_matrix()
        self.undo = self.matrix @ torch.linalg.pinv(self.matrix.T @ self.matrix, hermitian=True)


class WatchedCanary:
    """A canary, how it moves the clipped sum, and where to look for it in what is released.

    direction: of a released gradient, scaled so that the claimed noise has standard deviation 1 along it.
    start, shift: where the statistic is without the canary, but for the noise, and how far the canary moves it.
    """

    def __init__(self, canary: Canary, rig: Rig, lift: Lift, background: list[Record]) -> None:
        self.canary = canary
        base = rig.clipped([*background, blank()]).vector
        change = rig.clipped([*background, canary.record]).vector - base
        scaled = [Record(canary.record.x * scale, canary.record.g) for scale in SCALES]
        changes = [rig.clipped([*background, one]).vector - base for one in scaled]
        norms = [float(c.norm()) / MAX_GRAD_NORM for c in (change, *changes)]
        self.sensitivity = Sensitivity(max(norms), norms[0], canary.reach)
        # The noise sits before the lift A, so the best statistic of y undoes it: c^T A^+ y.
        direction = lift.undo @ change
        if norms[0] < TOLERANCE:  # nothing of it enters: look where its whole gradient would be
            direction = _whole_gradient(rig, canary.record)
        deviation = rig.optimizer.noise_multiplier * MAX_GRAD_NORM * float((lift.matrix.T @ direction).norm())
        self.noisy = deviation > TOLERANCE * float(direction.norm())
        self.direction = direction / deviation if self.noisy else direction
        self.start, self.shift = (float(self.direction @ (lift.matrix @ vector)) for vector in (base, change))


def worst_sensitivity(watched: Sequence[WatchedCanary]) -> Sensitivity:
    """Of canaries that are alike."""
    found = [w.sensitivity for w in watched]
    return Sensitivity(max(s.largest for s in found), min(s.own for s in found), found[0].wanted)


def _whole_gradient(rig: Rig, record: Record) -> Tensor:
    """The record's gradient of all parameters as it is without any projection."""
    parameters = list(rig.model.parameters())
    parts, at_x, at_g = [], 0, 0
    for parameter in parameters:
        if parameter.dim() == 2:
            outputs, inputs = parameter.shape
            x, g = record.x[at_x : at_x + inputs], record.g[at_g : at_g + outputs]
            at_x, at_g = at_x + inputs, at_g + outputs
            parts.append(torch.outer(g, x).flatten())
        else:
            parts.append(g)
    return torch.nn.functional.normalize(torch.cat(parts), dim=0)
