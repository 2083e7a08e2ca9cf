"""Fast paths compute the same numbers: compiled and padded runs against plain ones."""

import copy
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from lsg import DPSGD, LSG, ConfigurationError, PerfConfig, PrivacyEngine
from lsg.bench.contenders import Setting, private
from lsg.bench.presets import workload
from lsg.bench.shapes import Preset
from lsg.perf import padded_size
from tests.support.reference import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own compiler warns of itself


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, 50, (40, 6), generator=generator), torch.randint(0, 2, (40,)))


def train(perf: PerfConfig) -> tuple[Tensor, PrivacyEngine]:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
    config = BertConfig(**small, vocab_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(config)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=16, generator=torch.Generator().manual_seed(1)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=LSG(rank=2, sparsity=0.5),
        max_physical_batch_size=8,
        noise_generator=torch.Generator().manual_seed(2),
        perf=perf,
    )
    sizes = set()
    for _ in range(2):
        for x, y in loader:
            logits = model(x).logits
            assert len(logits) == len(x)
            F.cross_entropy(logits, y).backward()
            assert all(
                len(g[0] if isinstance(g, tuple) else g) == len(x) for g in engine.per_sample_gradients().values()
            )
            sizes.add(engine._recorder.batch.size)
            optimizer.step()
            optimizer.zero_grad()
    assert len(sizes) <= 4 or not perf.compiles
    return torch.cat([p.detach().flatten() for p in model.parameters()]), engine


class Sentences(TensorDataset):
    """Tells its records' lengths, as the tasks' data sets do."""

    lengths = tuple(1 + i % 6 for i in range(40))


def test_training_by_tokens_equals_training_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = train(PerfConfig())
    without_lengths = data
    monkeypatch.setitem(globals(), "data", lambda: Sentences(*without_lengths().tensors))
    found, engine = train(PerfConfig(max_tokens=12))
    assert (found - wanted).abs().max() < 1e-5
    sizes = [len(micro) for logical in engine.run.sampler.epoch for micro in logical]
    assert max(sizes) > 3 and min(sizes) <= 2  # 12 tokens are six records of 2 tokens, or two of 6


def test_compiled_and_padded_training_equals_plain_training() -> None:
    wanted, plain = train(PerfConfig())
    found, engine = train(PerfConfig(compile=True))
    assert (found - wanted).abs().max() < 1e-5
    assert plain.compile_seconds == 0.0 and engine.compile_seconds > 0.0
    assert engine.accountant.history == plain.accountant.history


def test_a_compiled_forward_has_no_graph_breaks() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    train(PerfConfig(compile=True))
    assert not counters["graph_break"]


@pytest.mark.parametrize("around", [nullcontext(), torch.device("cpu")], ids=["plain", "as in a recording"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "wrn"])
def test_a_benchs_model_is_compiled_as_one_graph(
    kind: str, precision: str, around: AbstractContextManager[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    width = 1 if kind == "wrn" else 128
    preset = Preset("small", kind, width, layers=1, tokens=8, micro_batch=3, micro_batches=2, feed_forward=64)
    setting = Setting(preset, workload(preset, torch.device("cpu")), torch.device("cpu"), precision)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    step = private(setting, LSG(rank=2, sparsity=0.5), PerfConfig(compile=True))
    for _ in range(2):
        with around:
            step()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("who", ["lsg", "user"])
def test_a_compiled_model_needs_no_zero_grad(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward reports weights that get no gradient, too: those of the last step are no escape."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 4)
    private, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        perf=PerfConfig(compile=who == "lsg"),
    )
    run = private if who == "lsg" else torch.compile(private)
    for _ in range(3):
        before = model[0].weight.detach().clone()
        run(x).square().mean().backward()
        optimizer.step()
        assert not torch.equal(model[0].weight, before)


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(-1, 1)


@pytest.mark.parametrize("make", [LossInside, Flattened])
def test_where_padding_cannot_be_told_from_samples_there_is_none(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own loss would be over padding, too; results that are not one row a sample cannot be cut."""
    monkeypatch.setattr("torch.compile", lambda forward, mode=None: forward)
    torch.manual_seed(0)
    plain = make()
    x = torch.randn(3, 4)
    found = {}
    for perf in (PerfConfig(compile=True), PerfConfig()):
        model = copy.deepcopy(plain)
        engine, _, _ = attach(model, DPSGD(), perf=perf, max_physical_batch_size=64)
        for _ in range(2):
            model.zero_grad()
            before = torch.get_rng_state()
            model(x).square().mean().backward()
            assert torch.equal(torch.get_rng_state(), before)
        assert engine._recorder.batch.size == 3
        found[perf] = engine.per_sample_gradients()
    for name, gradient in found[PerfConfig()].items():
        torch.testing.assert_close(found[PerfConfig(compile=True)][name], gradient)


def test_padding_never_enters_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compile", lambda forward, mode=None: forward)
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    _, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(9, 4)), batch_size=3),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=64,
        perf=PerfConfig(compile=True),
    )
    model(torch.randn(5, 4)).square().sum(1).mean().backward()
    for parts in optimizer.gradients.recorder.per_sample():
        for part in parts:
            part[5:] = 1e3  # as if padding had got gradients
    optimizer.gradients.collect(5)
    assert float(optimizer.gradients.sum.vector.norm()) <= 5.0


@pytest.mark.parametrize(
    ("size", "largest", "padded"), [(1, 256, 64), (64, 256, 64), (65, 256, 128), (256, 256, 256), (300, 256, 320),
     (5, None, 5), (65, None, 80), (80, None, 80), (113, None, 128), (129, None, 160), (1, None, 1), (3, 3, 3),
     (7, 10, 9), (10, 10, 10)],
)  # fmt: skip
def test_padded_sizes_are_few_and_large_enough(size: int, largest: int | None, padded: int) -> None:
    assert padded_size(size, largest) == padded >= size


def test_a_copy_of_a_compiled_model_can_be_compiled_and_detached_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compile", lambda forward, mode=None: forward)
    model: nn.Module = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    for _ in range(2):
        engine = PrivacyEngine()
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.randn(9, 4)), batch_size=3),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            perf=PerfConfig(compile=True),
        )
        twin = copy.deepcopy(model)
        with torch.no_grad():
            assert torch.equal(model(torch.ones(3, 4)), twin(torch.ones(3, 4)))
        engine.detach()
        assert "forward" not in vars(model)
        model = twin


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        PerfConfig(compile="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="cuda_graphs must be None, True or False"):
        PerfConfig(cuda_graphs="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="max_tokens must be at least 1"):
        PerfConfig(max_tokens=0)
