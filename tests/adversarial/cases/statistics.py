"""Numbers computed over the batch, with and without gradients, and layers that are allowed to have some."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.adversarial.cases.collection import Two, W, case, sequences, vectors

MIXES = {
    "mean": lambda h: h - h.mean(0),
    "mean_detached": lambda h: h - h.mean(0).detach(),
    "standard_deviation": lambda h: h / (h.std(0) + 0.1),
    "softmax": lambda h: h.softmax(0),
    "running_sum": lambda h: h.cumsum(0),
    "maximum": lambda h: h / h.abs().max(),
    "maximum_detached": lambda h: h / h.detach().abs().max(),
    "roll": lambda h: h.roll(1, 0),
    "neighbour_detached": lambda h: h + h.roll(1, 0).detach(),
    "sort": lambda h: h.sort(0).values,
    "rank": lambda h: h * h.detach()[:, :1].argsort(0).argsort(0),
    "divided_by_the_number": lambda h: h / len(h),
    "quantile": lambda h: h.clamp(max=float(h.detach().quantile(0.5))),
    "branch": lambda h: h * 2 if float(h.detach().mean()) > 0 else h,
    "dropout_by_the_batch": lambda h: h * (h.detach() > h.detach().mean(0)),
    "whitening": lambda h: h @ torch.linalg.inv(h.T @ h + torch.eye(W, dtype=h.dtype)),
    "gram": lambda h: (h @ h.T).softmax(-1) @ h,
    "last_record_only": lambda h: torch.cat([h[:-1], h[-1:] + h[:1]]),
    "numpy": lambda h: h - torch.from_numpy(h.detach().numpy().mean(0)),
}


def _register(name: str) -> None:
    class Mixed(Two):
        def between(self, h: Tensor) -> Tensor:
            return MIXES[name](h)

    Mixed.__name__ = f"mixed_by_{name}"
    case("refused", vectors(5, 4))(Mixed)


for _name in MIXES:
    _register(_name)


@case("refused", vectors(5, 4))
class MixedInputs(Two):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@case("refused", vectors(5, 4))
class MixedOutputs(Two):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(0)


@case("refused", vectors(5, 4), modes=[False, True])
class MixedInTrainingAlone(Two):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self.training else h


@case("refused", vectors(5, 4))
class MixedInAModuleOfOnesOwn(Two):
    """A batch norm by hand: record by record it would be another function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnBatchNorm()

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


class OwnBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(W))

    def forward(self, h: Tensor) -> Tensor:
        return (h - h.mean(0)) * self.scale


@case("refused", vectors(5, 4))
class RoutedByCapacity(Two):
    """A mixture of experts whose first expert takes two records of a batch, the ones that want it most."""

    def between(self, h: Tensor) -> Tensor:
        taken = torch.zeros(len(h), 1, dtype=h.dtype)
        taken[h.detach()[:, 0].topk(min(2, len(h))).indices] = 1
        return taken * h.tanh() + (1 - taken) * h


@case("right or refused", vectors(5, 4))
class RoutedByThemselves(Two):
    def between(self, h: Tensor) -> Tensor:
        taken = (h[:, :1] > 0).to(h.dtype)
        return taken * h.tanh() + (1 - taken) * h


@case("refused", vectors(5, 4))
def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Linear(W, W))


@case("right", vectors(5, 4, 1), modes=[False] * 3)
def frozen_batch_norm() -> nn.Module:
    """In evaluation mode, under a trained head: a fixed function of each record."""
    return nn.Sequential(nn.BatchNorm1d(W), nn.Linear(W, W)).eval().apply(_freeze_norm)


class KeptInEvaluation(nn.Sequential):
    """As fine-tuning recipes do: the body's norms stay in evaluation mode whatever the model is told."""

    def train(self, mode: bool = True) -> "KeptInEvaluation":
        super().train(mode)
        self[0].eval()
        return self


@case("right", vectors(5, 4, 1))
def batch_norm_kept_in_evaluation() -> nn.Module:
    return KeptInEvaluation(nn.BatchNorm1d(W), nn.Linear(W, W)).apply(_freeze_norm)


def _freeze_norm(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm1d):
        module.requires_grad_(False)


@case("refused", vectors(5, 4))
def frozen_batch_norm_in_training() -> nn.Module:
    """Trains nothing, but takes the batch's statistics all the same."""
    return nn.Sequential(nn.BatchNorm1d(W), nn.Linear(W, W)).apply(_freeze_norm)


@case("right", sequences(4, 3, 1))
class NormsOfOneRecord(Two):
    def __init__(self) -> None:
        super().__init__()
        self.group, self.layer = nn.GroupNorm(2, W), nn.LayerNorm(W)
        self.instance = nn.InstanceNorm1d(W, affine=True)

    def between(self, h: Tensor) -> Tensor:
        return self.instance(self.group(self.layer(h).mT)).mT


@case("refused", vectors(5, 4))
class FunctionalBatchNorm(Two):
    def between(self, h: Tensor) -> Tensor:
        rows = torch.cat([h, h.new_zeros(1, W)])
        return F.batch_norm(rows, None, None, training=True)[: len(h)]


@case("refused", vectors(5, 4))
class LayerNormOverTheBatch(Two):
    def between(self, h: Tensor) -> Tensor:
        return F.layer_norm(h.T, (len(h),)).T
