"""Clean operations that are modules of some kind: attention, convolutions, own parameters, gates, adapters, ties."""

import random

import torch
import torch.nn.functional as F_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


@clean
class Attention(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.MultiheadAttention(F, 1, batch_first=True)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        padding = None if mask is None else ~mask.expand(len(h), -1)
        return h + self.layer(h, h, h, key_padding_mask=padding, need_weights=False)[0]


@clean
class OwnAttention(Op):
    """Query, key and value by hand; the mask is added to the scores."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.qkv, self.out = nn.Linear(F, 3 * F), nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = q @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(1), -9.0)
        return h + self.out(scores.softmax(-1) @ v)


@clean
class Convolution(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Conv1d(F, F, rng.choice([1, 3]), padding="same")

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h.mT).mT


@clean
class ConvolutionOfRows(Op):
    """Records and positions folded together, features as the axis of the convolution."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h.reshape(-1, 1, h.shape[-1])).reshape(h.shape)


@clean
class Groups(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer, self.fold = nn.GroupNorm(1, F), rng.random() < 0.5

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h.reshape(-1, h.shape[-1])).view_as(h) if self.fold else self.layer(h.mT).mT


@clean
class NormOfRecord(Op):
    """Over positions and features at once."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.LayerNorm((T, F))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


@clean
class Checkpointed(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Sequential(nn.Linear(F, F), nn.Tanh(), nn.Linear(F, F))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return checkpoint(self.layer, h, use_reentrant=False)


@clean
class NoDropout(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Sequential(nn.Linear(F, F), nn.Dropout(0.0), nn.GELU())

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


@clean
class WeightUsedByHand(Op):
    """Outside its module's forward."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return F_.linear(h, self.layer.weight)


@clean
class RelativeTable(Op):
    """DeBERTa's: a table of relative positions goes through a layer as it is, for all records at once."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.table, self.layer = nn.Embedding(T, F), nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return h + self.layer(self.table.weight)[: h.shape[1]]


@clean
class MaskedByHand(Op):
    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        h = self.layer(h)
        return h if mask is None else torch.where(mask.unsqueeze(-1), h, 0.0)


@clean
class CalledOnceMoreWithAMask(Op):
    """Another number of calls from batch to batch."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        h = self.layer(h).tanh()
        return h if mask is None else self.layer(h)


@clean
class CalledWithAMaskOnly(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer, self.other = nn.Linear(F, F), nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h).tanh() if mask is None else self.other(h)


@clean
class BareAdapter(Op):
    """LoRA and DoRA with bare parameters on a frozen weight."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = Adapter(F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h)


class Adapter(nn.Module):
    def __init__(self, F: int) -> None:
        super().__init__()
        self.base = nn.Linear(F, F).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(1, F)), nn.Parameter(torch.zeros(F, 1))
        self.magnitude = nn.Parameter(torch.ones(F))

    def forward(self, h: Tensor) -> Tensor:
        weight = self.base.weight + self.up @ self.down
        return h @ (self.magnitude * weight / weight.norm(dim=1, keepdim=True)).T


@clean
class CountsItsCalls(Op):
    """A buffer in which no record has a say."""

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        self.calls.add_(1.0)
        return self.layer(h)


@clean
class WritesToItsInput(Op):
    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        h = h * 1.0
        h[..., :1] = 0.5
        return self.layer(h)


@clean
class ConcatenatedPositions(Op):
    """All positions of a record as one vector."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.Linear(T * F, T * F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer(h.flatten(1)).view_as(h)


@clean
class AttentionInWindows(Op):
    """Swin's: attention in windows that are folded into the batch."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.layer = nn.MultiheadAttention(F, 1, batch_first=True)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        windows = 2 if h.shape[1] % 2 == 0 else 1
        w = h.reshape(len(h) * windows, -1, h.shape[-1])
        return self.layer(w, w, w, need_weights=False)[0].reshape(h.shape)


@clean
class SharedMemory(Op):
    """Attention to a memory (1, N, F) that all records share."""

    dims = (3,)

    def make(self, F: int, T: int, rng: random.Random) -> None:
        self.memory, self.key, self.value = nn.Embedding(3, F), nn.Linear(F, F), nn.Linear(F, F)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        memory = self.memory(torch.arange(3).unsqueeze(0))
        return h + (h @ self.key(memory).mT).softmax(-1) @ self.value(memory)
