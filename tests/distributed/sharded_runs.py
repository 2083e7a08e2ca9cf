"""Private runs of models that may be sharded by FSDP2, the same but for that."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lsg import PrivacyEngine, losses
from lsg.models import wide_resnet
from tests.distributed.runs import METHODS, Net


class Block(nn.Module):
    """Some layers behind a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 16)

    def _inner(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.norm(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(20, 16), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Llama(nn.Module):
    """A tiny Llama: tokens in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            tie_word_embeddings=True,
        )
        self.inner = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, use_cache=False).logits


class Fused(nn.Module):
    """A layer that gives queries, keys and values at once, in parts that lie on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
        return self.head((q * k + v).mean(1))


class Wide(nn.Module):
    """Weights that are much larger than their factors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(20, 64), nn.Linear(64, 256), nn.Linear(256, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.embed(tokens).mean(1))))


def _layers(model: nn.Module) -> list[nn.Module]:
    """What is sharded by itself, beside the model."""
    if isinstance(model, Llama):
        return list(model.inner.model.layers)
    if isinstance(model, Checkpointed):
        return list(model.blocks)
    if isinstance(model, Net | Wide | Fused):
        return [model.embed]
    return [model.stage1, model.stage2, model.stage3]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "checkpointed": Checkpointed,
    "llama": Llama,
    "wide": Wide,
    "fused": Fused,
    "wrn": lambda: wide_resnet(10, 1, classes=3, in_channels=1),
}


@dataclass(frozen=True)
class Case:
    """What a run is made with; everything has a seed."""

    model: str = "net"
    method: str = "lsg"
    clipping: str = "flat"
    records: int = 40
    batch_size: int = 8
    epochs: int = 3
    physical: int | None = 3
    noise_multiplier: float = 0.8
    mixed: bool = False
    offload: bool = False
    reshard: bool | None = None
    momentum: bool = False
    views: int = 1
    unit_of: list[int] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def shard(model: nn.Module, case: Case) -> nn.Module:
    options: dict[str, Any] = {"reshard_after_forward": case.reshard}
    if case.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


@dataclass
class Run:
    case: Case
    engine: PrivacyEngine
    model: nn.Module
    optimizer: Any
    loader: Any


def begin(case: Case, *, sharded: bool, ledger: Any = None) -> Run:
    torch.manual_seed(0)
    model = MODELS[case.model]()
    draw = torch.Generator().manual_seed(1)
    if case.model == "wrn":
        inputs = torch.randn(case.records, 1, 8, 8, generator=draw)
    else:
        inputs = torch.randint(0, 20, (case.records, 7), generator=draw)
    labels = torch.randint(0, 3, (case.records,), generator=draw)
    if sharded:
        shard(model, case)
    engine = PrivacyEngine(accountant="rdp", ledger=ledger)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if case.momentum
        else torch.optim.Adam(model.parameters(), lr=0.01),
        data_loader=DataLoader(
            TensorDataset(inputs, labels), batch_size=case.batch_size, generator=torch.Generator().manual_seed(2)
        ),
        noise_multiplier=0.0 if case.method == "non-private" else case.noise_multiplier,
        max_grad_norm=1.0,
        method=case.extra.get("method", METHODS[case.method]),
        clipping=case.clipping,  # type: ignore[arg-type]
        max_physical_batch_size=case.physical,
        noise_generator=torch.Generator().manual_seed(3),
        views=case.views,
        unit_of=case.unit_of,
        **{name: value for name, value in case.extra.items() if name != "method"},
    )
    return Run(case, engine, *made)


def loss(run: Run, inputs: Tensor, labels: Tensor) -> Tensor:
    if run.case.views > 1:
        inputs, labels = inputs.repeat_interleave(run.case.views, 0), labels.repeat_interleave(run.case.views, 0)
    if run.case.model == "llama":
        return losses.per_sequence(run.model(inputs), inputs, shift=True)
    return F.cross_entropy(run.model(inputs).float(), labels)


def train_epoch(run: Run) -> None:
    for inputs, labels in run.loader:
        loss(run, inputs, labels).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@dataclass(frozen=True)
class Ended:
    weights: dict[str, Tensor]
    epsilon: float
    steps: int


def ended(run: Run) -> Ended:
    for module in run.model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    weights = {name: whole(p) for name, p in run.model.named_parameters()}
    return Ended(weights, run.engine.get_epsilon(1e-3), len(run.engine.accountant))


def train(case: Case, sharded: bool) -> Ended:
    run = begin(case, sharded=sharded)
    for _ in range(case.epochs):
        train_epoch(run)
    result = ended(run)
    run.engine.detach()
    return result


def train_all(cases: list[Case], sharded: bool) -> list[Ended]:
    return [train(case, sharded) for case in cases]


def distance(one: Ended, other: Ended) -> float:
    assert one.weights.keys() == other.weights.keys()
    return max((one.weights[name] - other.weights[name]).abs().max().item() for name in one.weights)


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """How many numbers each call of a collective moves, by the name of the function in torch.distributed."""
    found: dict[str, list[int]] = {}
    names = ["all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"]
    names = [name for name in [*names, "all_reduce"] if hasattr(dist, name)]
    own = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            found.setdefault(name, []).append(tensor.numel())
            return own[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name in names:
            setattr(dist, name, own[name])
