"""Clean operations that change from batch to batch, count, write to their inputs, or fold windows into the batch."""

import random

import torch
from torch import Tensor, nn

from tests.adversarial.ops import Op, clean


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
