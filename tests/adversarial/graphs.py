"""Random models from a seed: a stem, some operations, perhaps one that mixes records, and batches that go with them."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lsg import DPSGD, LSG, RGP
from lsg.methods import Method
from tests.adversarial.kinds import CLEAN, MIXING
from tests.adversarial.ops import Op, Sizes
from tests.adversarial.records import Batch, batch
from tests.adversarial.stems import ID_STEMS, IMAGE_STEMS, MIXING_STEMS, VOCABULARY, Stem
from tests.adversarial.trial import Trial

_MIXING_SHARE = 0.4
_METHODS: list[Method] = [DPSGD(), LSG(rank=2, sparsity=0.5), RGP(rank=2)]
_OF_ONE_LENGTH = {"NormOfRecord", "ConcatenatedPositions"}  # operations whose layers know the number of positions
_IMAGE = (2, 4, 4)  # channels, height, width: 4 positions in `Patches` and `RowsOfPixels`


@dataclass(frozen=True)
class Program:
    """A model in words: what it takes, its stem and operations, what it gives back."""

    seed: int
    inputs: str  # "vectors" (B, F), "sequences" (B, T, F), "images" or "ids"
    sizes: Sizes
    stem: type[Stem] | None
    ops: tuple[type[Op], ...]
    output: str  # "whole", "pooled", "dictionary" or "pair"
    frozen: int | None  # the number of an operation that is not trained

    def __str__(self) -> str:
        stem = [self.stem.__name__] if self.stem else []
        return f"{self.inputs} {self.sizes}: {' > '.join([*stem, *(op.__name__ for op in self.ops)])} -> {self.output}"


class Graph(nn.Module):
    """Runs a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        rng = random.Random(f"layers {program.seed}")
        self.stem = program.stem(program.sizes, rng) if program.stem else None
        self.ops = nn.ModuleList(op(program.sizes, rng) for op in program.ops)
        self.head = nn.Linear(program.sizes.F, 2)
        self.output = program.output
        if program.frozen is not None:
            self.ops[program.frozen].requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        h = x if self.stem is None else self.stem(x)
        for op in self.ops:
            h = op(h, mask)
        if self.output == "whole":
            return self.head(h)
        pooled = h.mean(1) if h.dim() == 3 else h
        y = self.head(pooled)
        if self.output == "dictionary":
            return {"logits": y, "hidden": h}
        return (y, pooled) if self.output == "pair" else y


def draw_program(seed: int) -> Program:
    rng = random.Random(f"program {seed}")
    inputs = rng.choice(["vectors", "sequences", "sequences", "images", "ids"])
    stem = {"images": IMAGE_STEMS, "ids": ID_STEMS}.get(inputs)
    chosen = rng.choice(stem) if stem else None
    dims = chosen.dims if chosen else (2 if inputs == "vectors" else 3)
    T = 4 if inputs == "images" else rng.randint(2, 5)
    ops = [_draw(CLEAN, dims, rng) for _ in range(rng.randint(1, 3))]
    if rng.random() < _MIXING_SHARE:
        if inputs == "ids" and rng.random() < 0.3:
            chosen = rng.choice([stem for stem in MIXING_STEMS if stem.dims == dims])
        else:
            ops.insert(rng.randint(0, len(ops)), _draw(MIXING, dims, rng))
    frozen = rng.randrange(len(ops)) if rng.random() < 0.15 else None
    output = rng.choice(["whole", "whole", "pooled", "dictionary", "pair"])
    return Program(seed, inputs, Sizes(rng.randint(2, 6), T), chosen, tuple(ops), output, frozen)


def _draw(kinds: dict[str, type[Op]], dims: int, rng: random.Random) -> type[Op]:
    return rng.choice([op for op in kinds.values() if dims in op.dims])


def draw_batches(program: Program) -> list[Batch]:
    """Two or three batches: sizes from 1 to 6, often the number of positions or features; masks that come and go; a
    broken record now and then."""
    rng, generator = random.Random(f"batches {program.seed}"), torch.Generator().manual_seed(program.seed)
    F, T = program.sizes.F, program.sizes.T
    fixed = program.inputs == "images" or any(op.__name__ in _OF_ONE_LENGTH for op in program.ops)
    batches = []
    for _ in range(rng.choice([2, 2, 3])):
        length = T if fixed or rng.random() < 0.8 else rng.randint(2, T)
        shapes = {"vectors": (F,), "sequences": (length, F), "images": _IMAGE, "ids": (length,)}
        size = rng.choice([1, 2, 3, 4, 5, 6, T, F])
        shape = (size, *shapes[program.inputs])
        if program.inputs == "ids":
            x = torch.randint(0, VOCABULARY, shape, generator=generator)
        else:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            if rng.random() < 0.2:
                _break(x[rng.randrange(size)], rng)
        batches.append(_with_mask(x, size, length, rng, generator))
    if not any(b.size > 1 and bool(b.args[0].isfinite().all()) for b in batches):
        batches.append(_several_whole_records(batches[-1]))  # or mixing could hide
    return batches


def _several_whole_records(last: Batch) -> Batch:
    def grown(t: Tensor) -> Tensor:
        t = t.nan_to_num(1.0, 1.0, 1.0) if t.is_floating_point() else t
        return torch.cat([t, t.flip(-1), t.roll(1, -1)])

    return last.each(grown)


def _break(record: Tensor, rng: random.Random) -> None:
    """All of it, or one number. Behind a tanh, an infinite number leaves a part of the gradient whole."""
    kind = rng.choice(["all", "all", "nan", "inf"])
    if kind == "all":
        record.fill_(torch.nan)
    else:
        record.view(-1)[rng.randrange(record.numel())] = torch.nan if kind == "nan" else torch.inf


def _with_mask(x: Tensor, size: int, T: int, rng: random.Random, generator: torch.Generator) -> Batch:
    kind = rng.choice(["none", "none", "(1, T)", "(B, T)"])
    if kind == "none":
        return batch(x) if rng.random() < 0.5 else batch(x, None)
    mask = torch.rand(1 if kind == "(1, T)" else size, T, generator=generator) < 0.7
    mask[:, 0] = True  # every record has a position that counts
    shared = kind == "(1, T)"
    if rng.random() < 0.3:
        return batch(x, mask=mask, shared=("mask",) if shared else ())
    return batch(x, mask, shared=(1,) if shared else ())


def draw_trial(seed: int) -> Trial:
    """The attack with this number: always the same."""
    program, rng = draw_program(seed), random.Random(f"trial {seed}")
    batches = draw_batches(program)
    modes = [rng.random() < 0.8 for _ in batches] if rng.random() < 0.2 else []

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return Graph(program).double()

    return Trial(
        build,
        batches,
        method=rng.choice(_METHODS),
        reduction=rng.choice(["sum", "mean"]),
        modes=modes,
        stateful=any(op.__name__ == "Remembers" for op in program.ops),
        seed=seed,
    )
