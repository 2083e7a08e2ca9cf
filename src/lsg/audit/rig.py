"""A private training run whose per-sample gradients can be chosen freely, driven through the engine's own step.

The model is a row of linear layers side by side, and a record (x, g) has the loss ⟨model(x), g⟩. So the record's
gradient in each layer is the outer product of its own parts of g and x: any rank-one matrix, in any of the layers.

Where units of several rows are audited, a record (x, g) stands for a whole unit: its rows are x in different sizes,
whose mean is x.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg.engine import PrivacyEngine
from lsg.methods import Clipping, Method
from lsg.step.clipping import ClippedSum
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


@dataclass(frozen=True)
class UnitShape:
    """What the audited units are made of: so many records of one id in a step, at most, and so many views of each.

    Every other unit has one record more in the data set than may enter a step, the others have one record alone.
    """

    records: int = 1
    views: int = 1

    @property
    def named(self) -> bool:
        """Whether units are the records of one id each."""
        return self.records > 1

    def in_data(self, unit: int) -> int:
        """Records of unit number so and so in the data set."""
        return self.records + 1 if self.named and unit % 2 else 1

    def in_step(self, unit: int) -> int:
        """Records with which it enters a step."""
        return min(self.records, self.in_data(unit))

    def viewed(self, rows: Tensor) -> Tensor:
        """All views of each row, adjacent: in different sizes, whose mean is the row."""
        return _spread(rows, [self.views] * len(rows)) if self.views > 1 else rows


ONE_RECORD = UnitShape()


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
    """A step as it was taken: the units in its batch, and the gradient that was released, times its divisor.

    torn: those of the units that did not come with all of their records.
    """

    members: list[int]
    released: Tensor
    torn: list[int]


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

    records: the data set, one for each unit. sample_rate: of them, in a step. unit: what each is made of. Learning rate
    0: the adversary sees every gradient anyway.
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
        unit: UnitShape = ONE_RECORD,
    ) -> None:
        self.unit = unit
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = SideBySide()
        owners = [number for number in range(len(records)) for _ in range(unit.in_data(number))]
        data = TensorDataset(*_batch(records, [unit.in_data(n) for n in range(len(records))]), torch.tensor(owners))
        self.engine = PrivacyEngine()
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.0),
            data_loader=DataLoader(data, batch_size=round(sample_rate * len(records))),
            noise_multiplier=noise_multiplier,
            max_grad_norm=MAX_GRAD_NORM,
            method=method,
            clipping=clipping,
            views=unit.views,
            unit_of=owners if unit.named else None,
            max_records_per_unit=unit.records if unit.named else None,
            noise_generator=torch.Generator().manual_seed(seed if noise_seed is None else noise_seed),
        )
        assert isinstance(self.optimizer.gradients, PrivateGradients)
        self.gradients: PrivateGradients = self.optimizer.gradients
        self._owners: list[int] = []  # of each record of the batch under way, its unit
        self._steps: list[Step] = []
        # At every real step, those on empty batches too, which the loader takes out of sight.
        self.optimizer.register_step_pre_hook(self._note)

    def clipped(self, records: Sequence[Record]) -> ClippedSum:
        """What one step sums up over these units, before noise."""
        sizes = [self.unit.in_step(number) for number in range(len(records))]
        self._backward(*_batch(records, sizes))
        self.gradients.collect(None, [size * self.unit.views for size in sizes] if self.unit.named else None)
        total = self.gradients.sum
        assert total is not None
        self.gradients.forget_sum()
        return total

    def epoch(self) -> list["Step"]:
        """One epoch over the loader: every step that was taken."""
        self._steps = []
        for x, g, who in self.loader:
            self._backward(x, g)
            self._owners += who.tolist()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self._steps

    def _note(self, *_: object) -> None:
        came = Counter(self._owners)
        torn = [unit for unit, records in came.items() if records != self.unit.in_step(unit)]
        self._steps.append(Step(list(came), self.released(), torn))
        self._owners = []

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
        (self.model(self.unit.viewed(x)) * g.repeat_interleave(self.unit.views, 0)).sum(1).mean().backward()

    def close(self) -> None:
        self.engine.detach()


def _batch(records: Sequence[Record], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """sizes: how many rows stand for each record."""
    x, g = torch.stack([r.x for r in records]), torch.stack([r.g for r in records])
    return _spread(x, sizes), g.repeat_interleave(torch.tensor(sizes), 0)


def _spread(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each row so many times, adjacent, in different sizes, whose mean is the row."""
    weights = torch.cat([(2 * torch.arange(size, dtype=rows.dtype) + 1) / size for size in sizes])
    return rows.repeat_interleave(torch.tensor(sizes), 0) * weights[:, None]
