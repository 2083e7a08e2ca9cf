"""Models that a recording would compute wrongly are found out, and run as usual: same numbers, one warning."""

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from lsg import DPSGD, LSG, NonPrivate, PerfConfig, PrivacyEngine
from lsg.parameters.garbage import without_garbage_collection
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


@pytest.mark.parametrize(
    ("make", "before", "finding"), UNSAFE, ids=[f"{m.__name__}, {b.__name__}" for m, b, _ in UNSAFE]
)
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
    small: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
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


def test_comparisons_come_often_at_first_and_never_end() -> None:
    due = [number for number in range(1, 5000) if is_due(number)]
    assert due == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]


def test_a_difference_is_told_from_rounding() -> None:
    large, small = torch.ones(100), torch.full((100,), 1e-3)
    names = ["large", "small"]
    assert first_difference(names, [large * 1.0001, small], [large, small], within=1e-3) is None
    assert first_difference(names, [large, -small], [large, small], within=3e-2) is None  # rounding of what is large
    assert first_difference(names, [large * 1.01, small], [large, small], within=1e-3) == "large, by 1.0%"
    assert first_difference(names, [large, small + 1e-2], [large, small], within=1e-3) == "small, by 10.0%"
    assert first_difference(["some"], [large[:5]], [large], within=1e-3) == "some has another shape"
    assert first_difference(["count"], [torch.tensor(3)], [torch.tensor(4)], within=1e-3) == "count"
    infinite = torch.tensor([1.0, torch.inf, torch.nan])
    assert first_difference(["odd"], [infinite], [infinite.clone()], within=1e-3) is None


class Plain(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_a_model_with_hooks_inside_is_not_recorded() -> None:
    features: dict[str, Tensor] = {}

    def make() -> nn.Module:
        model = Plain()
        model.first.register_forward_hook(lambda module, args, output: features.update(last=output))
        return model

    with pytest.warns(UserWarning, match="'first' has a hook"):
        batch_gradients(make, CHOOSES, 6, nothing)
    assert not AgainTape.replays


def test_a_hook_that_comes_later_is_found_too() -> None:
    called = []

    def hook_later(model: Any, number: int) -> None:
        if number == 7:
            model.last.register_forward_hook(lambda *_: called.append(1))

    with pytest.warns(UserWarning, match="'last' has a hook"):
        batch_gradients(Plain, CHOOSES, 9, hook_later)
    assert AgainTape.replays and len(called) >= 2


def test_inputs_get_their_gradients() -> None:
    """A recording gives them none."""
    model = Plain()
    attach(model, DPSGD(), perf=CHOOSES)
    for _ in range(6):
        model.zero_grad()
        x = torch.randn(4, 6, requires_grad=True)
        model(x).square().sum(1).mean().backward()
        assert x.grad is not None
    assert not AgainTape.replays


def test_a_second_backward_is_found_out_while_models_run_as_usual() -> None:
    model = Plain()
    engine, optimizer, _ = attach(model, DPSGD(), perf=CHOOSES)
    with pytest.warns(UserWarning, match="backward is called twice") as told:
        for _ in range(6):
            out = model(torch.ones(4, 6))
            out[:, 0].mean().backward(retain_graph=True)
            first = engine.per_sample_gradients()["last.bias"].clone()
            out[:, 1].mean().backward()
            assert not torch.equal(engine.per_sample_gradients()["last.bias"], first)
            optimizer.zero_grad()
    assert len(told) == 1


@pytest.mark.filterwarnings("ignore")  # PyTorch's own compiler warns of itself
def test_a_user_may_compile_a_model_that_would_be_recorded() -> None:
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(4, 6)
    engine, optimizer, _ = attach(model, DPSGD(), perf=CHOOSES)
    compiled = torch.compile(model, backend="eager")
    found = []
    for run in (model, *[compiled] * 8):
        run(x).square().sum(1).mean().backward()
        found.append(engine.per_sample_gradients()["first.weight"].clone())
        optimizer.zero_grad()
    assert not AgainTape.replays
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0])


def test_numbers_of_modules_belong_to_the_recording() -> None:
    """A dropout's share, say, set once in a while: neither stale nor found fault with."""

    def rarely(model: Any, number: int) -> None:
        model.number = 1.0 if number < 10 else 2.0

    wanted = batch_gradients(ReadsANumber, EAGER, 24, rarely)
    found = batch_gradients(ReadsANumber, CHOOSES, 24, rarely)
    assert AgainTape.replays > 20
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a["last.weight"], b["last.weight"])


def test_nothing_is_collected_while_something_is_recorded() -> None:
    """`KernelTape` looks; an error in a recording leaves the collector on."""
    train(Plain, DPSGD(), PerfConfig(pad=False))
    assert AgainTape.replays and gc.isenabled()
    with pytest.raises(ValueError), without_garbage_collection():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_a_detached_model_keeps_no_recordings() -> None:
    model = Plain()
    engine, optimizer, _ = attach(model, DPSGD(), perf=CHOOSES)
    for _ in range(8):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.zero_grad()
    graphed = engine._attached.fast._graphed
    assert graphed.recorded == 1 and graphed._shapes
    engine.detach()
    assert not graphed._shapes


@pytest.mark.parametrize("kind", [AgainTape, KernelTape])
def test_a_run_that_is_continued_goes_on_bit_by_bit(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, and recordings that are made and compared at other batches than in the run that went through."""
    use_tape(monkeypatch, kind)

    def start() -> Any:
        torch.manual_seed(0)
        model = Drops()
        data = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
        engine = PrivacyEngine()
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=16, generator=torch.Generator().manual_seed(1)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method=DPSGD(),
            max_physical_batch_size=4,
            noise_generator=torch.Generator().manual_seed(2),
        )
        return engine, model, optimizer, loader

    def epochs(run: Any, count: int) -> None:
        _, model, optimizer, loader = run
        for _ in range(count):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    first = start()
    epochs(first, 3)
    of_engine, of_model = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
    second = start()
    second[1].load_state_dict(of_model)
    second[0].load_state_dict(of_engine)
    epochs(second, 3)
    through = start()
    epochs(through, 6)
    for a, b in zip(second[1].parameters(), through[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_object_that_a_model_returns_is_not_an_old_one() -> None:
    """A decoder's keys and values: those of a recording would be another batch's, and keep all of it in memory."""
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20, intermediate_size=16
    )
    model = LlamaForCausalLM(config)
    attach(model, LSG(rank=2), perf=CHOOSES)
    for number in range(7):
        model.zero_grad()
        out = model(torch.randint(0, 20, (4, 5)))
        out.logits.square().mean((1, 2)).mean().backward()
        if number < 5:
            assert out.past_key_values.get_seq_length() == 5
    with pytest.raises(AttributeError, match="returned a DynamicCache here, which a recorded forward does not"):
        out.past_key_values.get_seq_length()
    assert AgainTape.replays == 2 * 6
