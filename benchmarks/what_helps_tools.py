"""Tools that `benchmarks/what_helps.py` tries and lsg does not have: noisy gradients in, others out.

Each is post-processing of what a step has released, but for `AdaptiveClip`, which pays for its count.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lsg.parameters import stack
from lsg.parameters.slot import Slot
from lsg.step.optimizer import PrivateOptimizer
from lsg.subspace.decompose import gaussian, orthonormal


def noise_deviation(optimizer: PrivateOptimizer) -> float:
    """Of each number of the noisy mean, before the lift."""
    return optimizer.noise_multiplier * optimizer.max_grad_norm / optimizer.expected_batch_size


def noise_variance(slot: Slot) -> Tensor | float:
    """Of each element of a lifted gradient, where the factors' noise has variance 1.

    G = P dL R + L dR with P = I - L L^T; dL has noise on kept rows (a), dR on kept columns (b):
    Var G_ij = (sum_k a_k P_ik^2) (sum_k R_kj^2) + (sum_k L_ik^2) b_j.
    """
    space = slot.subspace
    if space is None:
        return 1.0
    left, right = space.left, space.right
    projection = torch.eye(len(left)) - left @ left.mT
    rows = projection.square() @ space.left_mask.float()
    variance = torch.outer(rows, right.square().sum(0)) + torch.outer(left.square().sum(1), space.right_mask.float())
    return (variance.mT if space.transposed else variance).reshape(slot.parameter.shape)


class NoiseAwareAdam(torch.optim.Optimizer):
    """DP-AdamBC (Tang et al. 2023): the second moment without the part of it that is known to be noise."""

    def __init__(self, parameters: Any, lr: float, floor: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "floor": floor})
        self.private: PrivateOptimizer  # set once it is known

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        recorder = self.private.gradients.recorder  # type: ignore[attr-defined]
        slots = {slot.parameter: slot for slot in recorder.slots.values()}
        base = noise_deviation(self.private) ** 2
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
                    state["noise"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 1 - first)
                state["square"].lerp_(parameter.grad.square(), 1 - second)
                state["noise"].mul_(second).add_((1 - second) * base * noise_variance(slots[parameter]))
                signal = (state["square"] - state["noise"]) / (1 - second ** state["step"])
                floor = group["floor"] * state["noise"] / (1 - second ** state["step"])
                mean = state["mean"] / (1 - first ** state["step"])
                parameter.sub_(lr * mean / signal.maximum(floor).sqrt().add_(1e-8))


class LowPass:
    """DOPPLER (Zhang et al. 2024), first order: m_t = a m_{t-1} + (1 - a) (g_t + g_{t-1}) / 2, without its bias."""

    def __init__(self, optimizer: PrivateOptimizer, keep: float) -> None:
        self._keep, self._weight = keep, 0.0
        self._state: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        optimizer.register_step_pre_hook(self._filter)

    @torch.no_grad()
    def _filter(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        first, half = not self._state, (1 - self._keep) / 2
        self._weight = self._keep * self._weight + half * (1 if first else 2)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            filtered, last = self._state.get(parameter, (torch.zeros_like(parameter),) * 2)
            filtered = self._keep * filtered + half * (parameter.grad + last)
            self._state[parameter] = filtered, parameter.grad.clone()
            parameter.grad.copy_(filtered / self._weight)


class Shrink:
    """Singular values of noisy matrices, shrunk as white noise of known size asks for (Gavish and Donoho 2017).

    A projected weight's two factors are shrunk, and lifted again.
    """

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        self._private = optimizer
        optimizer.register_step_pre_hook(self._shrink)

    @torch.no_grad()
    def _shrink(self, *_: Any) -> None:
        deviation = noise_deviation(self._private)
        for slot in self._private.gradients.recorder.slots.values():  # type: ignore[attr-defined]
            gradient = slot.parameter.grad
            if gradient.dim() < 2:
                continue
            matrix, space = gradient.flatten(1), slot.subspace
            if space is None:
                gradient.copy_(shrunk(matrix, deviation).view_as(gradient))
                continue
            whole = matrix.mT if space.transposed else matrix
            d_right = space.left.mT @ whole
            d_left = (whole - space.left @ d_right) @ space.right.mT
            rows, columns = space.left_mask, space.right_mask
            d_right[:, columns] = shrunk(d_right[:, columns], deviation)
            d_left[rows] = shrunk(d_left[rows], deviation)
            d_left -= space.left @ (space.left.mT @ d_left)
            lifted = d_left @ space.right + space.left @ d_right
            gradient.copy_((lifted.mT if space.transposed else lifted).reshape(gradient.shape))


def shrunk(matrix: Tensor, deviation: float) -> Tensor:
    """The best estimate, in squared error, of a low-rank matrix behind white noise."""
    small, large = sorted(matrix.shape)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    y, beta = values / (deviation * math.sqrt(large)), small / large
    inside = ((y.square() - beta - 1).square() - 4 * beta).clamp(min=0)
    best = torch.where(y > 1 + math.sqrt(beta), inside.sqrt() / y, 0.0) * deviation * math.sqrt(large)
    return (u * best) @ v


class AdaptiveClip:
    """Andrew et al. 2021: C follows a quantile of the gradients' norms, by a noisy count of those below C.

    The step as a whole is the Gaussian mechanism of `sigma`: gradients have noise sigma_g, the count sigma_count, and
    sigma^-2 = sigma_g^-2 + (2 sigma_count)^-2, as a record moves the centred count by 1/2.
    """

    def __init__(self, sigma: float, batch: int, quantile: float = 0.5, rate: float = 0.2) -> None:
        self.sigma_count = max(batch / 20, sigma)
        self.sigma_gradients = (sigma**-2 - (2 * self.sigma_count) ** -2) ** -0.5
        self._batch, self._quantile, self._rate = batch, quantile, rate
        self._centred = 0.0

    def see(self, norms: Tensor, clip: float) -> None:
        self._centred += float((norms <= clip).double().sub(0.5).sum())

    def follow(self, optimizer: PrivateOptimizer) -> None:
        share = (self._centred + self.sigma_count * float(torch.randn(()))) / self._batch + 0.5
        optimizer.max_grad_norm = optimizer.max_grad_norm * math.exp(-self._rate * (share - self._quantile))
        self._centred = 0.0


@contextlib.contextmanager
def subspaces_from(source: str) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Where L and R come from: "weights", "random", or "updates": the average of gradients that the caller collects."""
    own, own_refresh, now, seen = stack.decompose, stack.Stack.refresh, [], {}

    def refresh(self: stack.Stack, *arguments: Any) -> None:
        now[:] = self.slots
        own_refresh(self, *arguments)

    def decompose(weights: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if source == "updates" and all(slot.parameter in seen for slot in now):
            past = torch.stack([seen[slot.parameter].flatten(1) for slot in now])
            return own(past.mT if now[0].layout.transposed else past, rank, generator)
        if source == "random":
            weights = gaussian(tuple(weights.shape), weights, generator)
            left = orthonormal(weights[:, :, : min(rank, *weights.shape[1:])], generator)
            right = orthonormal(
                gaussian((len(weights), weights.shape[2], left.shape[2]), weights, generator), generator
            )
            return left, right.mT
        return own(weights, rank, generator)

    stack.decompose, stack.Stack.refresh = decompose, refresh  # type: ignore[assignment, method-assign]
    try:
        yield seen
    finally:
        stack.decompose, stack.Stack.refresh = own, own_refresh  # type: ignore[method-assign]
