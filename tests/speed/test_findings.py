"""Models that a recording would compute wrongly are found out, and run as usual: same numbers, one warning."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from lsg import DPSGD, LSG, NonPrivate, PerfConfig, PrivacyEngine
from lsg.speed.comparison import first_difference, is_due
from tests.support.reference import attach
from tests.support.tapes import AgainTape, KernelTape, use_tape

EAGER, CHOOSES = PerfConfig(compile=False, cuda_graphs=False), PerfConfig()


@pytest.fixture(autouse=True)
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tape(monkeypatch, KernelTape)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def body(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * scale)


class ReadsAnAttribute(Body):
    weights = torch.ones(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.weights)


class ReadsAnAttributeInPlace(ReadsAnAttribute):
    pass


HELD: dict[str, Any] = {}


class ReadsAGlobalTensor(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, HELD["weights"])


class ReadsAGlobalNumber(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, HELD["number"])


class ReadsANumber(Body):
    number = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.number)


class DrawsInPython(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, random.random())


class Counts(Body):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x)


class Appends(Body):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.body(x)


class KeepsItsFeatures(Body):
    features: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.features = torch.tanh(self.first(x))
        return self.last(self.features)


class Constant(Body):
    """Reads a tensor that is no buffer and never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((8,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.scale)


class Drops(Body):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.first(x))))


class Caches(Body):
    """Fills a cache when it meets a shape for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.cache.setdefault(len(x), 2.0))


def batch_gradients(
    make: Callable[[], nn.Module], perf: PerfConfig, batches: int, before: Callable[[Any, int], None]
) -> list[dict[str, Any]]:
    """Per-sample gradients of each batch, without steps between them, so that runs stay comparable."""
    torch.manual_seed(0)
    random.seed(0)
    model = make()
    engine, optimizer, _ = attach(model, DPSGD(), perf=perf)
    found = []
    for number in range(batches):
        before(model, number)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        model(x).square().sum(1).mean().backward()
        found.append({name: g.clone() for name, g in engine.per_sample_gradients().items()})
        optimizer.zero_grad()
    return found


def nothing(model: Any, number: int) -> None:
    pass


def new_tensor(model: Any, number: int) -> None:
    model.weights = torch.full((4, 1), 1.0 + number)


def same_values(model: Any, number: int) -> None:
    """For a while: then other ones."""
    model.weights = torch.full((4, 1), 1.0 if number < 20 else 3.0)


def global_tensor(model: Any, number: int) -> None:
    HELD["weights"] = torch.full((4, 1), 1.0 + number)


def global_number(model: Any, number: int) -> None:
    HELD["number"] = 1.0 + number


def late_number(model: Any, number: int) -> None:
    HELD["number"] = 1.0 if number < 6 else 2.0


def attribute_number(model: Any, number: int) -> None:
    model.number = 1.0 + number


UNSAFE = [
    (ReadsAnAttribute, new_tensor, "'weights', which the model's forward reads, is another tensor"),
    (ReadsAnAttribute, same_values, "'weights', which the model's forward reads, is another tensor"),
    (ReadsAGlobalTensor, global_tensor, r"reads a tensor of shape \(4, 1\) that is neither its input nor a parameter"),
    (ReadsAGlobalNumber, global_number, r"something else than the model \(tensor 1 that the model returns, by"),
    (ReadsANumber, attribute_number, r"attributes of the model \(number\) get other values over and over"),
    (DrawsInPython, nothing, "draws random numbers in Python"),
    (Counts, nothing, "the model's forward changes 'calls'"),
    (Appends, nothing, "the model's forward changes 'seen'"),
    (KeepsItsFeatures, nothing, "the model's forward changes 'features'"),
]


@pytest.mark.parametrize(("make", "before", "finding"), UNSAFE, ids=[f"{m.__name__}, {b.__name__}" for m, b, _ in UNSAFE])
def test_what_a_recording_would_get_wrong_is_found_out_and_every_batch_has_the_plain_gradients(
    make: Any, before: Callable[[Any, int], None], finding: str
) -> None:
    wanted = batch_gradients(make, EAGER, 24, before)
    with pytest.warns(UserWarning, match=finding) as told:
        found = batch_gradients(make, CHOOSES, 24, before)
    assert len(told) == 1
    for a, b in zip(found, wanted, strict=True):
        for name, gradient in b.items():
            torch.testing.assert_close(a[name], gradient)


def test_what_changes_later_is_noticed_at_the_next_comparison() -> None:
    """Nothing but values tells of a global number."""
    wanted = batch_gradients(ReadsAGlobalNumber, EAGER, 24, late_number)
    with pytest.warns(UserWarning, match="something else than the model") as told:
        found = batch_gradients(ReadsAGlobalNumber, CHOOSES, 24, late_number)
    assert len(told) == 1
    same = [torch.equal(a["last.weight"], b["last.weight"]) for a, b in zip(found, wanted, strict=True)]
    assert [number for number, is_same in enumerate(same) if not is_same] == [6, 7]  # batch 8 is the 8th replay


def train(make: Callable[[], nn.Module], method: Any, perf: PerfConfig) -> Tensor:
    torch.manual_seed(0)
    model = make()
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=32, generator=torch.Generator().manual_seed(1)),
        noise_multiplier=0.0 if isinstance(method, NonPrivate) else 1.0,
        max_grad_norm=1.0,
        method=method,
        max_physical_batch_size=4,
        noise_generator=torch.Generator().manual_seed(2),
        perf=perf,
    )
    for _ in range(4):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("method", [DPSGD(), LSG(rank=2, sparsity=0.5), NonPrivate()], ids=str)
@pytest.mark.parametrize("make", [Body, Drops, Constant, Caches])
def test_a_model_of_its_inputs_is_recorded_without_a_word_and_trains_the_same(make: Any, method: Any) -> None:
    """Dropout too: comparisons draw nothing, and replays draw what the plain run would."""
    make = type("Plain", (Body,), {"forward": Body.body}) if make is Body else make
    wanted = train(make, method, PerfConfig(cuda_graphs=False, pad=False))
    AgainTape.replays = 0
    found = train(make, method, PerfConfig(pad=False))
    assert AgainTape.replays > 40
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_encoder_of_transformers_is_recorded_without_a_word(dropout: float) -> None:
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(**small, vocab_size=50, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)

    def gradients(perf: PerfConfig) -> list[Tensor]:
        torch.manual_seed(0)
        model = BertForSequenceClassification(config)
        seeded = torch.Generator().manual_seed(3)
        engine, optimizer, _ = attach(model, LSG(rank=2, sparsity=0.5), perf=perf, noise_generator=seeded)
        found = []
        for number in range(9):
            ids = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(number))
            mask = torch.ones_like(ids)
            mask[number % 4, 3:] = 0
            F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, ids[:, 0] % 2).backward()
            per_sample = engine.per_sample_gradients().values()
            found.append(torch.cat([p.flatten() for g in per_sample for p in (g if isinstance(g, tuple) else (g,))]))
            optimizer.zero_grad()
        return found

    wanted = gradients(EAGER)
    AgainTape.replays = 0
    found = gradients(CHOOSES)
    assert AgainTape.replays == 2 * 8  # batches 1 to 8, of which five were compared: forward and backward
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
