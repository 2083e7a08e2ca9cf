"""A private training run whose per-sample gradients can be chosen freely, driven through the engine's own step.

The model is a row of linear layers side by side, and a record (x, g) has the loss ⟨model(x), g⟩. So the record's
gradient in each layer is the outer product of its own parts of g and x: any rank-one matrix, in any of the layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg.engine import PrivacyEngine
from lsg.methods import Method
from lsg.step.clipping import ClippedSum, Clipping
from lsg.step.gradients import PrivateGradients

MAX_GRAD_NORM = 1.0
WEIGHT_RANK = 3  # of the projected layers' weights: at this rank every refresh finds the same subspaces again
# Inputs and outputs. Rank 3 pays for the first three, two of them of one shape; the head is dense and has a bias.
LAYERS = {"first": (16, 20), "second": (16, 20), "third": (12, 24), "head": (6, 5)}


@dataclass(frozen=True)
class Record:
    """What the model sees of a sample, x, and how its loss weighs the outputs, g."""

    x: Tensor
    g: Tensor


def blank() -> Record:
    """A record without a gradient: it stands in for one that is not there, as the number of records is public."""
    inputs, outputs = (sum(sizes) for sizes in zip(*LAYERS.values(), strict=True))
    return Record(torch.zeros(inputs, dtype=torch.float64), torch.zeros(outputs, dtype=torch.float64))


def record(parts: dict[str, tuple[Tensor, Tensor]]) -> Record:
    """layer -> (its inputs, the weights of its outputs); other layers get no gradient."""
    made = blank()
    for name, (x, g) in parts.items():
        at = list(LAYERS).index(name)
        made.x.split([inputs for inputs, _ in LAYERS.values()])[at].copy_(x)
        made.g.split([outputs for _, outputs in LAYERS.values()])[at].copy_(g)
    return made


@dataclass(frozen=True)
class Step:
    """A step as it was taken: the records in its batch, and the gradient that was released, times its divisor."""

    members: list[int]
    released: Tensor


class SideBySide(nn.Module):
    """Each layer on its own part of the input; the outputs joined. The projected layers' weights have a low rank."""

    def __init__(self) -> None:
        super().__init__()
        for name, (inputs, outputs) in LAYERS.items():
            layer = nn.Linear(inputs, outputs, bias=name == "head", dtype=torch.float64)
            if name != "head":
                shapes = (outputs, WEIGHT_RANK), (WEIGHT_RANK, inputs)
                left, right = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
                layer.weight.data = left @ right
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([inputs for inputs, _ in LAYERS.values()], dim=1)
        return torch.cat([self.get_submodule(name)(part) for name, part in zip(LAYERS, parts, strict=True)], dim=1)


class Rig:
    """An engine attached to the model: clipped sums of chosen records, releases of them, whole training runs.

    records: the data set. sample_rate: of them, in a step. Learning rate 0: the adversary sees every gradient anyway.
    """

    def __init__(
        self,
        method: Method,
        clipping: Clipping,
        records: Sequence[Record],
        *,
        noise_multiplier: float,
        seed: int,
        noise_seed: int | None = None,
        sample_rate: float = 1.0,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = SideBySide()
        data = TensorDataset(*_batch(records), torch.arange(len(records)))
        self.engine = PrivacyEngine()
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.0),
            data_loader=DataLoader(data, batch_size=round(sample_rate * len(data))),
            noise_multiplier=noise_multiplier,
            max_grad_norm=MAX_GRAD_NORM,
            method=method,
            clipping=clipping,
            noise_generator=torch.Generator().manual_seed(seed if noise_seed is None else noise_seed),
        )
        assert isinstance(self.optimizer.gradients, PrivateGradients)
        self.gradients: PrivateGradients = self.optimizer.gradients
        self._members: list[int] = []  # of the batch under way
        self._steps: list[Step] = []
        # At every real step, those on empty batches too, which the loader takes out of sight.
        self.optimizer.register_step_pre_hook(self._note)

    def clipped(self, records: Sequence[Record]) -> ClippedSum:
        """What one step sums up over these records, before noise."""
        self._backward(*_batch(records))
        self.gradients.collect(None)
        total = self.gradients.sum
        assert total is not None
        self.gradients.forget_sum()
        return total

    def epoch(self) -> list["Step"]:
        """One epoch over the loader: every step that was taken."""
        self._steps = []
        for x, g, who in self.loader:
            self._backward(x, g)
            self._members += who.tolist()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self._steps

    def _note(self, *_: object) -> None:
        self._steps.append(Step(self._members, self.released()))
        self._members = []

    def release(self, total: ClippedSum) -> Tensor:
        """The gradient that a step with this sum gives to the optimizer, with noise of its own each time."""
        self.gradients.sum = total
        self.gradients.recorder.hold_subspaces()  # many releases of one step: the subspaces stay
        self.gradients.release(self.optimizer.noise_multiplier)
        return self.released()

    def released(self) -> Tensor:
        """What stands in the parameters' `.grad`, as a noisy sum: times the expected batch size."""
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return torch.cat(gradients) * self.optimizer.expected_batch_size

    def lift_matrix(self) -> Tensor:
        """(parameters, numbers in a sum): how a sum becomes gradients. L, R and masks are public, and so is this."""
        recorder = self.gradients.recorder
        size = sum(slot.dimensions for slot in recorder.ready().values())
        columns = []
        for unit in torch.eye(size, dtype=torch.float64):
            lifted = {slot.name: gradient.flatten() for slot, gradient in recorder.lift(unit)}
            columns.append(torch.cat([lifted[name] for name, _ in self.model.named_parameters()]))
        return torch.stack(columns, dim=1)

    def _backward(self, x: Tensor, g: Tensor) -> None:
        (self.model(x) * g).sum(1).mean().backward()

    def close(self) -> None:
        self.engine.detach()


def _batch(records: Sequence[Record]) -> tuple[Tensor, Tensor]:
    return torch.stack([r.x for r in records]), torch.stack([r.g for r in records])
