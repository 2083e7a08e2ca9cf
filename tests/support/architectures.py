"""Random small models and batches for property-based tests: what is drawn is a plan in numbers, so that it can shrink.

A model maps (B, tokens) of indices, (B, tokens, width) of numbers or (B, channels, size, size) of pixels to logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lsg import DPSGD, LSG, RGP, SparseDPSGD
from lsg.methods import Method
from lsg.schedules import Ramp

VOCABULARY, CLASSES = 11, 3
# The same examples on every machine and every day; a slow machine is no failure.
DETERMINISTIC = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))

SEQUENCE_BLOCKS = (
    "linear",
    "linear_no_bias",
    "bottleneck",
    "layer_norm",
    "rms_norm",
    "attention",
    "attention_separate",
    "cross_attention",
    "conv",
    "twice",
    "shared",
    "folded",
    "positions",
    "bare",
    "prelu",
)
IMAGE_BLOCKS = ("conv", "conv_stride", "conv_groups", "conv_1x1", "group_norm", "instance_norm", "twice", "shared")


@dataclass(frozen=True)
class Blueprint:
    """kind: "tokens", "numbers" or "pixels". frozen: numbers of parameters that are not trained (modulo how many)."""

    kind: str
    width: int
    length: int
    blocks: tuple[str, ...]
    head: str
    frozen: tuple[int, ...]
    seed: int

    def build(self, dtype: torch.dtype = torch.float64) -> "Model":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = Model(self).to(dtype)
        parameters = list(model.parameters())
        for number in self.frozen:
            trained = [p for p in parameters if p.requires_grad]
            if len(trained) > 1:
                trained[number % len(trained)].requires_grad_(False)
        return model

    def ambiguous(self, size: int) -> bool:
        """As many positions as samples in a first batch are refused: which is which cannot be told."""
        return "positions" in self.blocks and self.length == size > 1

    def samples(self, size: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + seed)
        if self.kind == "tokens":
            return torch.randint(0, VOCABULARY, (size, self.length), generator=generator)
        shape = (self.length, self.width) if self.kind == "numbers" else (self.width, self.length + 1, self.length + 1)
        return torch.randn(size, *shape, generator=generator, dtype=torch.float64).to(dtype)


class Model(nn.Module):
    """What a blueprint describes."""

    def __init__(self, plan: Blueprint) -> None:
        super().__init__()
        self.plan, width = plan, plan.width
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0) if plan.kind == "tokens" else None
        make = _image_block if plan.kind == "pixels" else _sequence_block
        self.blocks = nn.ModuleList()
        for name in plan.blocks:
            shared = name == "shared" and len(self.blocks) > 0
            self.blocks.append(self.blocks[0] if shared else make(name, width, plan.length))
        self.head = nn.Linear(width, VOCABULARY if plan.head == "tied" else CLASSES, bias=plan.head != "tied")
        if plan.head == "tied" and self.embed is not None:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        if self.plan.kind == "pixels":
            x = x.flatten(2).mT
        return self.head(x.mean(1) if self.plan.head == "mean" else x).flatten(1)


class Call(nn.Module):
    """Modules put together by a function of them and the input."""

    def __init__(self, run: Any, *modules: nn.Module) -> None:
        super().__init__()
        self.run, self.parts = run, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        out = self.run(x, *self.parts)
        assert isinstance(out, Tensor)
        return out


class Bare(nn.Module):
    """Parameters of odd shapes that no rule knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.rand(1, width) + 0.5), nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


def _sequence_block(name: str, width: int, length: int) -> nn.Module:
    make: dict[str, Any] = {
        "linear": lambda: nn.Linear(width, width),
        "linear_no_bias": lambda: nn.Linear(width, width, bias=False),
        "bottleneck": lambda: nn.Sequential(nn.Linear(width, 2), nn.Tanh(), nn.Linear(2, width, bias=False)),
        "layer_norm": lambda: nn.LayerNorm(width),
        "rms_norm": lambda: nn.RMSNorm(width, eps=1e-6),
        "attention": lambda: Call(lambda x, a: a(x, x, x)[0], _attention(width)),
        "attention_separate": lambda: Call(
            lambda x, a: a(x, x[..., :2], x[..., 1:], need_weights=False)[0], _attention(width, kdim=2, vdim=width - 1)
        ),
        "cross_attention": lambda: Call(lambda x, a: a(x, x.flip(1), x.flip(1))[0], _attention(width)),
        "conv": lambda: Call(lambda x, c: c(x.mT).mT, nn.Conv1d(width, width, 3, padding=1)),
        "twice": lambda: Call(lambda x, m: m(m(x).tanh()), nn.Linear(width, width)),
        "shared": lambda: nn.Linear(width, width),
        "folded": lambda: Call(
            lambda x, m, n: n(m(x.reshape(-1, width))).view(x.shape), nn.Linear(width, width), nn.LayerNorm(width)
        ),
        "positions": lambda: Call(lambda x, e: e(_positions(x.shape[1])) + x, nn.Embedding(length, width)),
        "bare": lambda: Bare(width),
        "prelu": lambda: Call(lambda x, p: p(x), nn.PReLU()),
    }
    made: nn.Module = make[name]()
    return made


def _positions(length: int) -> Tensor:
    """Without a batch dimension, but for a single one, which could as well be a single sample's."""
    return torch.arange(length) if length > 1 else torch.zeros(1, 1, dtype=torch.long)


def _attention(width: int, **options: Any) -> nn.Module:
    return nn.MultiheadAttention(width, 2 if width % 2 == 0 else 1, batch_first=True, **options)


def _laid_out_plainly(y: Tensor) -> Tensor:
    """The reference needs it: see `layers/group_norm.py` on torch's own instance norm."""
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.contiguous())
    return y


def _image_block(name: str, width: int, size: int) -> nn.Module:
    make: dict[str, Any] = {
        "conv": lambda: nn.Conv2d(width, width, 3, padding=1),
        "conv_stride": lambda: Call(
            lambda x, c: nn.functional.interpolate(c(x), x.shape[2:]), nn.Conv2d(width, width, 2, stride=2, bias=False)
        ),
        "conv_groups": lambda: nn.Conv2d(width, width, 3, padding=1, groups=width),
        "conv_1x1": lambda: nn.Conv2d(width, width, 1),
        "group_norm": lambda: nn.GroupNorm(1, width),
        "instance_norm": lambda: Call(lambda x, n: _laid_out_plainly(n(x)), nn.InstanceNorm2d(width, affine=True)),
        "twice": lambda: Call(lambda x, m: m(m(x).tanh()), nn.Conv2d(width, width, 3, padding=1)),
        "shared": lambda: nn.Conv2d(width, width, 3, padding=1),
    }
    made: nn.Module = make[name]()
    return made


@st.composite
def blueprints(draw: st.DrawFn, kinds: tuple[str, ...] = ("tokens", "numbers", "pixels")) -> Blueprint:
    kind = draw(st.sampled_from(kinds))
    blocks = IMAGE_BLOCKS if kind == "pixels" else SEQUENCE_BLOCKS
    heads = ("mean", "flat", "tied") if kind == "tokens" else ("mean", "flat")
    return Blueprint(
        kind=kind,
        width=draw(st.integers(4, 9)),
        length=draw(st.integers(1, 4)),
        blocks=tuple(draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=4))),
        head=draw(st.sampled_from(heads)),
        frozen=tuple(draw(st.lists(st.integers(0, 20), max_size=2))),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def methods(draw: st.DrawFn) -> Method:
    """Ranks from 1 to far above any layer's, sparsities from none to all but one unit."""
    rank, sparsity = draw(st.sampled_from([1, 2, 3, 1000])), draw(st.sampled_from([0.0, 0.3, 0.5, 0.95, 0.999]))
    kind = draw(st.sampled_from(["lsg", "lsg", "rgp", "sparse", "dpsgd"]))
    if kind == "dpsgd":
        return DPSGD()
    if kind == "sparse":
        return SparseDPSGD(sparsity=sparsity, importance=draw(st.sampled_from(["weight", "random"])))
    project = draw(st.sampled_from([(), ("*weight",)]))  # the latter: even where it saves nothing
    fused = draw(st.sampled_from(["whole", "split"]))
    if kind == "rgp":
        return RGP(rank=rank, project=project, fused_qkv=fused)
    importance = draw(st.sampled_from(["weight", "random", "factor", "direct"]))
    schedule = draw(st.sampled_from([Ramp(0, 3), None]))
    options: dict[str, Any] = {} if schedule is None else {"schedule": schedule}
    return LSG(rank=rank, sparsity=sparsity, importance=importance, project=project, fused_qkv=fused, **options)


def sample_losses(output: Tensor) -> Tensor:
    """One loss for each sample, with a gradient that differs everywhere."""
    weights = torch.linspace(-1.0, 2.0, max(1, output[:1].numel()), dtype=torch.float64).cos().to(output.dtype)
    return (output * weights).sum(1).square() + output.square().mean(1)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return sample_losses(model(batch)).mean()
