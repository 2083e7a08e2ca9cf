"""How a case is written down: a model (or a whole training loop), its batches, and what must happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lsg import DPSGD, LSG, RGP
from tests.adversarial.oracle import judge, judge_loop
from tests.adversarial.outcome import Outcome
from tests.adversarial.records import Batch, batch
from tests.adversarial.trial import Trial

W = 6  # features of the models here
METHODS = (DPSGD(), LSG(rank=2, sparsity=0.5), RGP(rank=2))

# What must happen -> the outcomes that will do.
_ALLOWED = {
    "right": ("right",),
    "refused": ("refused",),
    "right or refused": ("right", "refused"),
    "warned": ("refused", "right"),  # or anything, with a warning
    # Nothing can be seen by lsg here: docs/privacy.md, "What is left to you", must name it (`test_cases.py`).
    "documented": ("refused", "right", "silent"),
}


@dataclass(frozen=True)
class Case:
    name: str
    must: str
    run: Callable[[], list[Outcome]]

    def accepts(self, outcome: Outcome) -> bool:
        return outcome.kind in _ALLOWED[self.must] or (self.must == "warned" and outcome.warned)


CASES: list[Case] = []


def case(must: str, batches: list[Batch], *, methods: Any = METHODS, **options: Any) -> Callable[[Any], Any]:
    """A model, given as a class (or function) without arguments: judged with every method."""

    def register(make: Any) -> Any:
        def build() -> nn.Module:
            torch.manual_seed(0)
            model = make()
            return model if options.get("tolerance", 0) > 1e-5 else model.double()

        def run() -> list[Outcome]:
            return [judge(Trial(build, batches, method=method, **options)) for method in methods]

        CASES.append(Case(f"{make.__module__.rpartition('.')[2]}.{make.__name__}", must, run))
        return make

    return register


def loop(must: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A whole training loop, which raises WrongError where lsg is wrong and has not said so."""

    def register(run: Callable[[], None]) -> Callable[[], None]:
        name = f"{run.__module__.rpartition('.')[2]}.{run.__name__}"
        CASES.append(Case(name, must, lambda: [judge_loop(run)]))
        return run

    return register


def vectors(*sizes: int, width: int = W, seed: int = 0) -> list[Batch]:
    """Batches of (B, F)."""
    return [batch(_normal(size, width, seed=seed + i)) for i, size in enumerate(sizes)]


def sequences(*sizes: int, positions: int = 3, width: int = W, seed: int = 0) -> list[Batch]:
    """Batches of (B, T, F)."""
    return [batch(_normal(size, positions, width, seed=seed + i)) for i, size in enumerate(sizes)]


def indices(*sizes: int, positions: int = 3, vocabulary: int = 8, seed: int = 0) -> list[Batch]:
    """Batches of whole numbers (B, T)."""
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(sizes))]
    shapes = [(size, positions) for size in sizes]
    return [batch(torch.randint(0, vocabulary, s, generator=g)) for s, g in zip(shapes, generators, strict=True)]


def masks(size: int, positions: int = 3, seed: int = 0) -> Tensor:
    """(size, positions) booleans, the first always True."""
    mask = torch.rand(size, positions, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:, 0] = True
    return mask


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Two(nn.Module):
    """Base of many models here: two linear layers; what happens between them is the case."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.last(self.between(self.first(x), *rest))

    def between(self, h: Tensor) -> Tensor:
        return h.tanh()
