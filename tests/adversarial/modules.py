"""Clean operations with parameters of one's own: scales, positions, prompts, gates, adapters, ties."""

import random

import torch
from torch import Tensor, nn

from tests.adversarial.ops import Op, clean


class Scale(nn.Module):
    """A module of one's own with a bare parameter."""

    def __init__(self, F: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(F))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scale * h.square().mean(-1, keepdim=True).add(1e-3).rsqrt()


class MaskedScale(nn.Module):
    """The same with an optional mask: None, (1, T) or (B, T)."""

    def __init__(self, F: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(F))

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        h = h * self.scale
        return h if mask is None else h * mask.unsqueeze(-1)


class Nested(nn.Module):
    """A bare parameter around a layer with a rule."""

    def __init__(self, F: int) -> None:
        super().__init__()
        self.shift, self.inner = nn.Parameter(torch.zeros(F)), nn.Linear(F, F)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h + self.shift).tanh()


class Positions(nn.Module):
    """A learned (1, T, F) that all records share."""

    def __init__(self, T: int, F: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, T, F))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.table[:, : h.shape[1]]


class Prompt(nn.Module):
    """Learned tokens before a record's own; takes no tensor at all."""

    def __init__(self, F: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(2, F))

    def forward(self, size: int) -> Tensor:
        return self.tokens.unsqueeze(0).expand(size, -1, -1)


class Gate(nn.Module):
    def __init__(self, F: int, *, vector: bool) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(F) if vector else torch.zeros(()))

    def forward(self, h: Tensor, branch: Tensor) -> Tensor:
        return h + self.gate * branch


@clean
class OwnParameter(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = rng.choice([Scale, Nested])(F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


@clean
class OwnParameterTimeFirst(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = rng.choice([Scale, Nested])(F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h.transpose(0, 1)).transpose(0, 1)


@clean
class OwnParameterFolded(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = rng.choice([Scale, Nested])(F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h.reshape(-1, h.shape[-1])).view_as(h)


@clean
class OptionalMask(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = MaskedScale(F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h, mask=mask)


@clean
class LearnedPositions(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = Positions(T, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


@clean
class PromptTuning(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.prompt, self.layer = Prompt(F), nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        longer = self.layer(torch.cat([self.prompt(len(h)), h], 1))
        return h + longer.mean(1, keepdim=True)


@clean
class EmbeddedPositions(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.table, self.how = nn.Embedding(T, F), rng.choice(["(T)", "(1, T)", "(B, T)"])

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        ids = torch.arange(h.shape[1])
        if self.how == "(1, T)":
            ids = ids.unsqueeze(0)
        elif self.how == "(B, T)":
            ids = ids.expand(len(h), -1)
        return h + self.table(ids)


@clean
class ZeroGate(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.gate, self.layer = Gate(F, vector=rng.random() < 0.5), nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.gate(h, self.layer(h).tanh())


@clean
class LoRA(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.base, self.down, self.up = nn.Linear(F, F), nn.Linear(F, 1, bias=False), nn.Linear(1, F, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.base(h) + self.up(self.down(h))


@clean
class TiedLinears(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.first, self.second = nn.Linear(F, F), nn.Linear(F, F)
        self.second.weight = self.first.weight

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.second(self.first(h).tanh())
