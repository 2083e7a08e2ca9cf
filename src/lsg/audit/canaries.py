"""Records chosen against the mechanism: L, R and the masks in, records whose clipped gradients tell most about it out.

For y = W x with L on the inputs and R on the outputs a record's factor gradients are ∂L = x (g Rᵀ) and ∂R = (x L)ᵀ g,
cut down to the kept inputs and outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lsg.audit.rig import LAYERS, Record, Rig, record
from lsg.methods import Method
from lsg.subspace import Subspace

TOGETHER = 5  # canaries inside the subspaces at a time, orthogonal to each other: as many as the head has outputs
LARGE = 1e4  # far above the clipping threshold in every layer


@dataclass(frozen=True)
class Canary:
    """name: where it sits. reach: the share of the clipping threshold that it must move the clipped sum by."""

    name: str
    record: Record
    reach: float


def inside(rig: Rig) -> list[Canary]:
    """In the active subspace of all layers, orthogonal to each other.

    x is a column of L and g lies in the kept outputs at right angles to R: the gradient is in ∂R alone, where no mask
    takes anything from it and the lift none either.
    """
    rows: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in range(TOGETHER)]
    spaces = rig.engine.subspaces
    for name, (inputs, outputs) in LAYERS.items():
        space = spaces.get(f"{name}.weight")
        x = torch.ones(inputs, dtype=torch.float64) if space is None else space.left[:, 0]
        directions = torch.eye(outputs, dtype=torch.float64) if space is None else _kept_and_across(space)
        for row, g in zip(rows, directions[:TOGETHER], strict=True):
            row[name] = LARGE * x, LARGE * g
    # A row of Sparse DPSGD's small head may be masked as a whole, which per-layer clipping does not make up for.
    return [Canary(f"inside {i}", record(row), 0.85) for i, row in enumerate(rows)]


def anywhere(seed: int) -> Canary:
    """At random in all layers: inside and outside the subspaces at once. What is outside must not count in the norm."""
    return Canary("anywhere", record({name: _random(name, seed) for name in LAYERS}), 0.999)


def in_one_layer(seed: int) -> list[Canary]:
    """One for each layer."""
    return [Canary(f"layer '{name}'", record({name: _random(name, seed)}), 0.0) for name in LAYERS]


def outside(rig: Rig, method: Method) -> Canary | None:
    """As large, and where nothing is trained: it must have no effect. None where everything is."""
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    for name, space in rig.engine.subspaces.items():
        if space.left_kept is not None and space.right_kept is not None:
            parts[name.removesuffix(".weight")] = (
                LARGE * (~space.left_mask).double(),
                LARGE * (~space.right_mask).double(),
            )
        else:  # nothing is masked: at right angles to L and R. Small, or its rounding errors would show.
            parts[name.removesuffix(".weight")] = _across(space.left.T), _across(space.right)
    if not parts and method.sparsity:
        slot = rig.gradients.recorder.ready()["first.weight"]
        assert slot.elements_kept is not None
        masked = torch.ones(slot.value.numel(), dtype=torch.bool).index_fill(0, slot.elements_kept, False)
        row, column = divmod(int(masked.nonzero()[0]), slot.value.shape[1])
        eyes = (torch.eye(size, dtype=torch.float64) for size in LAYERS["first"])
        x, g = (LARGE * eye[i] for eye, i in zip(eyes, (column, row), strict=True))
        parts["first"] = x, g
    return Canary("outside", record(parts), 0.0) if parts else None


def _random(name: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + list(LAYERS).index(name))
    x, g = (LARGE * torch.randn(size, generator=generator, dtype=torch.float64) for size in LAYERS[name])
    return x, g


def _kept_and_across(space: Subspace) -> Tensor:
    """Orthonormal rows that live on the kept outputs, at right angles to R's rows."""
    kept = space.right_mask.nonzero().flatten()
    across = torch.linalg.qr(space.right[:, kept].T, mode="complete").Q.T[space.rank :]
    return across.new_zeros(len(across), len(space.right_mask)).index_copy(1, kept, across)


def _across(rows: Tensor) -> Tensor:
    """A unit vector at right angles to all rows."""
    return torch.linalg.qr(rows.T, mode="complete").Q[:, -1]
