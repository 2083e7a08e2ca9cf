"""Per-sample gradients in, a clipped sum that carries its own L2 bound out.

The bound is the sensitivity: adding or removing one sample changes the sum by at most `bound` in L2 norm over all
trained parameters together. Noise is scaled by it and by nothing else.

Shapes: B = samples, K = slots (trained parameters).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lsg.errors import ConfigurationError
from lsg.methods import Clipping
from lsg.step.clip_groups import Part, by_slot, few_groups, make_block

_STABILITY = 0.01  # gamma of automatic clipping (Bu et al. 2023): keeps small gradients from being blown up


@dataclass(frozen=True)
class ClippedSum:
    """The sum of clipped per-sample gradients, one vector for all slots, and its sensitivity.

    units: how many samples are in it. shortened: how many of them the clip made shorter (`step/signals.py`). Neither
    is private, and no number of the sum depends on them.
    """

    vector: Tensor
    bound: float
    units: int = 0
    shortened: Tensor | float = 0.0

    def __add__(self, other: "ClippedSum") -> "ClippedSum":
        """Of two parts of one logical batch; a sample is in one of them only, so the larger bound holds for both."""
        return ClippedSum(
            self.vector + other.vector,
            max(self.bound, other.bound),
            self.units + other.units,
            self.shortened + other.shortened,
        )


@dataclass(frozen=True)
class Clipper:
    """mode and threshold(s): "flat" and "automatic" have one threshold C, "per_layer" one for each slot.

    flat: g * min(1, C / |g|), |g| over all slots jointly. Sensitivity C.
    per_layer: each slot by itself to C_k. Sensitivity sqrt(sum C_k^2). One number C means C_k = C / sqrt(K).
    automatic: g * C / (|g| + 0.01), never more than C. Sensitivity C.
    """

    mode: Clipping
    max_grad_norm: float | tuple[float, ...]

    def __post_init__(self) -> None:
        if self.mode not in ("flat", "per_layer", "automatic"):
            raise ConfigurationError(f"clipping={self.mode!r} must be 'flat', 'per_layer' or 'automatic'")
        norms = self.max_grad_norm if isinstance(self.max_grad_norm, tuple) else (self.max_grad_norm,)
        if not norms or not all(isinstance(c, int | float) and 0 < c < math.inf for c in norms):
            raise ConfigurationError(f"max_grad_norm={self.max_grad_norm!r} must be positive and finite")
        if isinstance(self.max_grad_norm, tuple) and self.mode != "per_layer":
            raise ConfigurationError(f"max_grad_norm={self.max_grad_norm!r}: several thresholds need 'per_layer'")

    def thresholds(self, slots: int) -> list[float]:
        """One for each slot; their squares sum to bound^2."""
        if not isinstance(self.max_grad_norm, tuple):
            return [self.max_grad_norm / math.sqrt(slots)] * slots
        if len(self.max_grad_norm) != slots:
            raise ConfigurationError(
                f"max_grad_norm has {len(self.max_grad_norm)} thresholds for {slots} trained parameters"
            )
        return list(self.max_grad_norm)

    @property
    def bound(self) -> float:
        """The sensitivity of a clipped sum."""
        if isinstance(self.max_grad_norm, tuple):
            return math.hypot(*self.max_grad_norm)
        return self.max_grad_norm

    def clip(
        self,
        per_sample: Sequence[Sequence[Part]],
        loss_scale: float,
        positions: Sequence[int] | None = None,
    ) -> ClippedSum:
        """per_sample: for each slot, per-sample gradients divided by `loss_scale`: matrices (B, ...), or their factors.

        positions: which threshold is which slot's, where the slots are not in the thresholds' order.
        """
        parts = [part for of_slot in per_sample for part in of_slot]
        # Thresholds of their own need norms of their own; a joint norm needs few, large kernels.
        groups = by_slot(per_sample) if self.mode == "per_layer" else few_groups(parts)
        blocks = [make_block([parts[i] for i in group]) for group in groups]
        norms_BK = torch.stack([block.row_norms() for block in blocks], dim=1) * loss_scale
        joint_B = torch.linalg.vector_norm(norms_BK, dim=1)
        unscaled_BK = self._factors(norms_BK, joint_B, positions or range(len(blocks)))
        shortened = (unscaled_BK < 1).double().mean(dim=1).sum()
        factors_BK = unscaled_BK * loss_scale
        # A sample with a NaN or Inf gradient counts as zero (rule 6): its factor is 0, and its entries too, as 0 * NaN
        # is NaN. Which samples these are is decided on the device: no step is skipped and nothing waits for the answer.
        factors_BK = torch.where(joint_B.isfinite().unsqueeze(1), factors_BK, 0.0)
        # A factor so small that it would be denormal has lost its digits, and could pass the bound: it is zero.
        factors = {
            dtype: F.threshold(factors_BK.to(dtype), torch.finfo(dtype).tiny, 0.0).unbind(1)
            for dtype in {block.dtype for block in blocks}
        }
        sums: dict[int, Tensor] = {}  # by the part's place: parts that are clipped together need not be neighbours
        for k, (group, block) in enumerate(zip(groups, blocks, strict=True)):
            total = block.weighted_sum(factors[block.dtype][k])
            sums |= zip(group, total.split([parts[i].shape[1] for i in group]), strict=True)
        return ClippedSum(torch.cat([sums[i] for i in range(len(parts))]), self.bound, len(joint_B), shortened)

    def _factors(self, norms_BK: Tensor, joint_B: Tensor, positions: Sequence[int]) -> Tensor:
        """What each sample's gradient is multiplied with in each slot."""
        if self.mode == "per_layer":
            thresholds = self.thresholds(norms_BK.shape[1])
            limits = [thresholds[position] for position in positions]
            return (torch.tensor(limits, dtype=norms_BK.dtype).to(norms_BK.device) / norms_BK).clamp(max=1.0)
        if self.mode == "automatic":
            joint = self.bound / (joint_B + _STABILITY)
        else:
            joint = (self.bound / joint_B).clamp(max=1.0)
        return joint.unsqueeze(1).expand_as(norms_BK)
