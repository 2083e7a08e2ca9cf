"""Frozen, validated descriptions of a training method: LSG, RGP, Sparse DPSGD, DPSGD, or no privacy at all.

All of them are one engine at different settings (`rank=None` means full rank):

    LSG(rank, sparsity)     low-rank factors, important rows and columns of them   (the paper)
    RGP(rank)               low-rank factors                                       (sparsity 0)
    SparseDPSGD(sparsity)   the important elements of the full gradient            (full rank)
    DPSGD()                 the full gradient                                      (full rank, sparsity 0)
    NonPrivate()            plain training in the same loop, without clipping and noise; its epsilon is infinite

`METHODS` lists them by their names on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lsg.errors import ConfigurationError
from lsg.files.plain_numbers import plain
from lsg.schedules import Constant, Schedule

if TYPE_CHECKING:
    from torch import nn

    Selector = str | type[nn.Module]  # a glob pattern over parameter names, or a module type

Importance = Literal["weight", "random", "factor", "direct"]
Clipping = Literal["flat", "per_layer", "automatic"]  # `step/clipping.py` says what each does

_IMPORTANCES: dict[bool, tuple[str, ...]] = {
    True: ("weight", "random", "factor", "direct"),
    False: ("weight", "random"),
}


@dataclass(frozen=True)
class Method:
    """What every method is made of; use one of the subclasses.

    rank, sparsity: r and p of the paper. Kept are the top (1 - p) of the units (or elements, at full rank).
    importance: what makes a unit worth training. "weight" is the paper's; "random", "factor" (the factors' own weights)
        and "direct" (mask after lifting) are its negative results, section 4.4.
    schedule: how much of the sparsity is in force at which logical step.
    dense, project: parameters that are never / always projected, by module type or by glob pattern over their names.
        Without them a weight is projected exactly where that saves numbers: r (m + n) < m n.
    fused_qkv: "whole" treats a fused query-key-value weight as one matrix (as RGP does), "split" as three.
    head, head_scale: per-sample gradients of the parameters matching `head` (default: those of the last linear layer)
        are multiplied by `head_scale` before clipping; RGP uses 1/10.
    """

    rank: int | None
    sparsity: float
    importance: Importance = "weight"
    schedule: Schedule = field(default_factory=Constant)
    dense: tuple[Selector, ...] = ()
    project: tuple[Selector, ...] = ()
    fused_qkv: Literal["whole", "split"] = "whole"
    head: tuple[str, ...] = ()
    head_scale: float = 1.0

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name in ("rank", "sparsity", "head_scale"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if self.rank is not None and (not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1):
            raise ConfigurationError(f"{kind}: rank={self.rank!r} must be a whole number of at least 1")
        if not isinstance(self.sparsity, int | float) or not 0 <= self.sparsity < 1:
            raise ConfigurationError(f"{kind}: sparsity={self.sparsity!r} must be a fraction in [0, 1)")
        known = _IMPORTANCES[self.rank is not None]
        if self.importance not in known:
            raise ConfigurationError(f"{kind}: importance={self.importance!r} must be one of {', '.join(known)}")
        if self.fused_qkv not in ("whole", "split"):
            raise ConfigurationError(f"{kind}: fused_qkv={self.fused_qkv!r} must be 'whole' or 'split'")
        if not self.head_scale > 0:
            raise ConfigurationError(f"{kind}: head_scale={self.head_scale!r} must be positive")
        if not hasattr(self.schedule, "share"):
            raise ConfigurationError(f"{kind}: schedule={self.schedule!r} must have a method share(step)")
        for option in ("dense", "project", "head"):
            if isinstance(getattr(self, option), str | type):
                raise ConfigurationError(f"{kind}: {option} must be a tuple, such as ({getattr(self, option)!r},)")

    def sparsity_at(self, step: int) -> float:
        """p at this logical step."""
        return self.sparsity * self.schedule.share(step)

    def __str__(self) -> str:
        parts = [f"r={self.rank}"] if self.rank is not None else []
        parts += [f"p={self.sparsity:g}"] if self.sparsity else []
        parts += [self.importance] if self.importance != "weight" else []
        return type(self).__name__ + (f"({', '.join(parts)})" if parts else "")


@dataclass(frozen=True)
class LSG(Method):
    """The paper's method: low-rank and sparse gradients."""

    rank: int | None = 8
    sparsity: float = 0.5

    def __post_init__(self) -> None:
        if self.rank is None:
            raise ConfigurationError("LSG: rank=None is full rank; use SparseDPSGD or DPSGD for that")
        super().__post_init__()


@dataclass(frozen=True)
class RGP(Method):
    """Reparametrized gradient perturbation: low rank, no sparsity."""

    rank: int | None = 8
    sparsity: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.rank is None:
            raise ConfigurationError("RGP: rank=None is full rank; use DPSGD for that")
        super().__post_init__()


@dataclass(frozen=True)
class SparseDPSGD(Method):
    """Full-rank gradients of the elements of each weight that are largest in absolute value."""

    rank: int | None = field(default=None, init=False)
    sparsity: float = 0.5


@dataclass(frozen=True)
class DPSGD(Method):
    """The classic: full gradients, clipped and noised."""

    rank: int | None = field(default=None, init=False)
    sparsity: float = field(default=0.0, init=False)


@dataclass(frozen=True)
class NonPrivate(Method):
    """No clipping, no noise, no privacy: the reference that the others are compared with."""

    rank: int | None = field(default=None, init=False)
    sparsity: float = field(default=0.0, init=False)


@dataclass(frozen=True)
class NamedMethod:
    """A method as the commands know it.

    title: its name in tables. options: those of rank, sparsity, importance and head_scale that a command can set of it.
    """

    kind: type[Method]
    title: str
    options: tuple[str, ...]


# Every method by its name on the command line, in the order in which tables list them. All commands read this.
METHODS = {
    "lsg": NamedMethod(LSG, "LSG", ("rank", "sparsity", "importance", "head_scale")),
    "rgp": NamedMethod(RGP, "RGP", ("rank", "head_scale")),
    "sparse-dpsgd": NamedMethod(SparseDPSGD, "Sparse DPSGD", ("sparsity", "importance", "head_scale")),
    "dpsgd": NamedMethod(DPSGD, "DPSGD", ("head_scale",)),
    "non-private": NamedMethod(NonPrivate, "N.P.", ()),
}
PRIVATE_METHODS = tuple(name for name, known in METHODS.items() if known.kind is not NonPrivate)


def make_method(
    name: str, *, rank: int = 8, sparsity: float = 0.5, importance: Importance = "weight", head_scale: float = 1.0
) -> Method:
    """The method of this name, one of METHODS. Options that it does not have (DPSGD has no rank) are left out."""
    values: dict[str, Any] = {"rank": rank, "sparsity": sparsity, "importance": importance, "head_scale": head_scale}
    known = METHODS[name]
    return known.kind(**{option: values[option] for option in known.options})
