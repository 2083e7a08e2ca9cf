"""What a method would do to a model: a model and a method in, a table out. Nothing is changed or trained."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from lsg.errors import ConfigurationError
from lsg.layers.parameter_treatments import treat_parameters
from lsg.methods import Method, NonPrivate
from lsg.model.validation import problems
from lsg.parameters.refresh import Refresh
from lsg.parameters.slot import Slot
from lsg.parameters.stack import make_stacks


@dataclass(frozen=True)
class Row:
    """One parameter (or one third of a split one)."""

    name: str
    shape: tuple[int, ...]
    kind: str  # projected, dense or frozen
    dimensions_before: int  # numbers that would get noise under DPSGD
    dimensions_after: int  # numbers that get noise under this method
    bytes_per_sample: int
    why: str


@dataclass(frozen=True)
class Explanation:
    """The table as data (`rows`), and as text (`str`)."""

    method: str
    rows: tuple[Row, ...]
    problems: tuple[str, ...] = ()  # why `make_private` would refuse the model

    def count(self, kind: str) -> int:
        return sum(row.kind == kind for row in self.rows)

    @property
    def dimensions_before(self) -> int:
        return sum(row.dimensions_before for row in self.rows)

    @property
    def dimensions_after(self) -> int:
        return sum(row.dimensions_after for row in self.rows)

    @property
    def bytes_per_sample(self) -> int:
        return sum(row.bytes_per_sample for row in self.rows)

    @property
    def signal_to_noise(self) -> float:
        """|clipped gradient| / |noise| of one sample at noise multiplier 1: 1 / sqrt(dimensions).

        A sample's clipped gradient has norm C at most and the noise C * sqrt(dimensions): fewer dimensions, less noise
        for the same signal. Divide by the noise multiplier and multiply by the batch size for a training step.
        """
        return 1 / math.sqrt(self.dimensions_after) if self.dimensions_after else math.inf

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows] + [len("parameter")])
        head = f"{'parameter':<{width}}  {'shape':<18} {'treatment':<10} {'DPSGD dims':>12} {'noise dims':>12} "
        lines = [head + f"{'bytes/sample':>12}  why"]
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            lines.append(
                f"{row.name:<{width}}  {shape:<18} {row.kind:<10} {row.dimensions_before:>12,} "
                f"{row.dimensions_after:>12,} {row.bytes_per_sample:>12,}  {row.why}"
            )
        counts = ", ".join(f"{self.count(kind)} {kind}" for kind in ("projected", "dense", "frozen"))
        ratio = self.dimensions_before / max(1, self.dimensions_after)
        lines.append(
            f"{self.method}: {counts}; noise dimensions {self.dimensions_before:,} -> {self.dimensions_after:,} "
            f"({ratio:.1f}x fewer), {self.bytes_per_sample:,} bytes a sample, expected signal-to-noise of a sample "
            f"{self.signal_to_noise:.2e} at noise multiplier 1 ({math.sqrt(ratio):.1f}x DPSGD's)"
        )
        lines += [f"make_private would refuse this model: {problem}" for problem in self.problems]
        return "\n".join(lines)


def explain(model: nn.Module, method: Method) -> Explanation:
    """Which parameters would be projected, dense or frozen, and what that does to noise and memory."""
    if isinstance(method, NonPrivate):
        raise ConfigurationError("NonPrivate adds no noise: there is nothing to explain")
    treatments = treat_parameters(model, method).parameters
    slots = {
        t.name: Slot(t.name, t.parameter, t.layout, narrow=t.narrow, maskable=t.maskable)
        for t in treatments
        if t.kind != "frozen"
    }
    # Of sharded weights each rank looks at its own rows: numbers are counted here, not compared.
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    Refresh(make_stacks(slots.values()), list(slots.values()), method, torch.Generator(device).manual_seed(0))(10**9)
    rows = []
    for t in treatments:
        slot, size = slots.get(t.name), math.prod(t.shape)
        after = slot.dimensions if slot else 0
        itemsize = slot.dtype.itemsize if slot else 0
        stored = sum(math.prod(shape) for shape in slot.shapes(1)) if slot else 0
        rows.append(Row(t.name, t.shape, t.kind, size if slot else 0, after, stored * itemsize, t.why))
    refusals = problems(model, [p for p in model.parameters() if p.requires_grad])
    return Explanation(str(method), tuple(rows), tuple(refusals))
