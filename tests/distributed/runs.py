"""Small private runs that are the same on one process and on several, but for how their batches are shared."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lsg import DPSGD, LSG, RGP, NonPrivate, PerfConfig, PrivacyEngine, SparseDPSGD
from lsg.methods import Method

METHODS: dict[str, Method] = {
    "lsg": LSG(rank=2, sparsity=0.5),
    "rgp": RGP(rank=2),
    "sparse": SparseDPSGD(sparsity=0.5),
    "dpsgd": DPSGD(),
    "non-private": NonPrivate(),
}


class Net(nn.Module):
    """An embedding, linear layers and a norm: projected, dense and masked parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.first, self.norm, self.last = nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.norm(F.gelu(self.first(self.embed(tokens))).mean(1)))


@dataclass(frozen=True)
class Setting:
    """What a run is made with; everything has a seed, so that it can be repeated."""

    method: str = "lsg"
    clipping: str = "flat"
    records: int = 60
    batch_size: int = 12
    epochs: int = 3
    noise_multiplier: float = 0.8
    physical: int | None = 5
    seed: int = 0
    order: int | None = None  # a seed; None: the records as they are
    views: int = 1
    unit_of: list[int] | None = None
    lengths: list[int] | None = None
    max_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class WithLengths(Dataset[Any]):
    """Records that say how long they are."""

    def __init__(self, data: TensorDataset, lengths: list[int]) -> None:
        self._data, self.lengths = data, lengths

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


@dataclass
class Run:
    """A private run before it trains."""

    engine: PrivacyEngine
    model: nn.Module
    optimizer: Any
    loader: Any


def begin(setting: Setting, *, wrap: Any = None, ledger: Any = None, secure: bool = False) -> Run:
    torch.manual_seed(setting.seed)
    model: nn.Module = Net()
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (setting.records, 7), generator=draw)
    labels = torch.randint(0, 3, (setting.records,), generator=draw)
    if setting.order is not None:
        places = torch.randperm(setting.records, generator=torch.Generator().manual_seed(setting.order))
        tokens, labels = tokens[places], labels[places]
    data: Any = TensorDataset(tokens, labels)
    if setting.lengths is not None:
        data = WithLengths(data, setting.lengths)
    if wrap is not None:
        model = wrap(model)
    engine = PrivacyEngine(accountant="rdp", ledger=ledger, secure_mode=secure)
    seeded = {} if secure else {"generator": torch.Generator().manual_seed(2)}
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        data_loader=DataLoader(data, batch_size=setting.batch_size, **seeded),
        noise_multiplier=0.0 if setting.method == "non-private" else setting.noise_multiplier,
        max_grad_norm=1.0,
        method=METHODS[setting.method],
        clipping=setting.clipping,  # type: ignore[arg-type]
        max_physical_batch_size=setting.physical,
        noise_generator=None if secure else torch.Generator().manual_seed(3),
        perf=PerfConfig(max_tokens=setting.max_tokens),
        views=setting.views,
        unit_of=setting.unit_of,
        **setting.extra,
    )
    return Run(engine, *made)


def train_epoch(run: Run, views: int = 1) -> list[int]:
    """One loop over the loader; sizes of the micro-batches that this rank had."""
    sizes = []
    for tokens, labels in run.loader:
        if views > 1:
            tokens, labels = tokens.repeat_interleave(views, 0), labels.repeat_interleave(views, 0)
        F.cross_entropy(run.model(tokens), labels).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        sizes.append(len(tokens))
    return sizes


@dataclass(frozen=True)
class Ended:
    """weights: of the trained model by name. epsilon: spent. sizes: of this rank's micro-batches."""

    weights: dict[str, Tensor]
    epsilon: float
    steps: int
    sizes: list[int]


def ended(run: Run, sizes: list[int]) -> Ended:
    model = getattr(run.model, "module", run.model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Ended(weights, run.engine.get_epsilon(1e-3), len(run.engine.accountant), sizes)


def train(setting: Setting, **options: Any) -> Ended:
    run = begin(setting, **options)
    sizes = [size for _ in range(setting.epochs) for size in train_epoch(run, setting.views)]
    result = ended(run, sizes)
    run.engine.detach()
    return result


def train_all(settings: list[Setting]) -> list[Ended]:
    """One after the other: starting processes is what takes the time."""
    return [train(setting) for setting in settings]


def distance(one: Ended, other: Ended) -> float:
    """The largest difference between two weights."""
    assert one.weights.keys() == other.weights.keys()
    return max((one.weights[name] - other.weights[name]).abs().max().item() for name in one.weights)
