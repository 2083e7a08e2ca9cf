"""Dense weights that leave input and output gradient in place of their product, through the engine, on a CPU."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lsg import DPSGD, LSG, PrivacyError, SparseDPSGD
from lsg.methods import Method
from lsg.parameters.outer import OuterProducts
from lsg.step.out_of_memory import BackwardInPieces
from tests.layers.test_rules import CASES, B, Repeated, normal, tokens
from tests.step.test_out_of_memory import Gpu, parts
from tests.support.factored import factored
from tests.support.reference import assert_per_sample_gradients, attach, batch_of_one_gradients
from tests.support.small_run import Training, stop_at

FULL_RANK: list[Method] = [DPSGD(), SparseDPSGD(sparsity=0.3)]


@pytest.fixture
def calls() -> Iterator[list[int]]:
    with factored() as seen:
        yield seen


def loss(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    weights = torch.linspace(-1, 2, math.prod(y.shape[1:]), dtype=y.dtype).cos().view(y.shape[1:])
    return ((y * weights).flatten(1).sum(1) ** 2).mean()


class TiedLinears(nn.Module):
    """One weight in two layers, as stored and transposed, and in a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Conv1D(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.first(x).tanh()))


def checkpointed(reentrant: bool) -> nn.Module:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 9))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.body, x.requires_grad_(), use_reentrant=reentrant)

    return Checkpointed()


MORE = {
    "tied_linears": (TiedLinears, normal(B, 4, 8)),
    "checkpointed": (lambda: checkpointed(False), normal(B, 3, 12)),
    "checkpointed_reentrant": (lambda: checkpointed(True), normal(B, 3, 12)),
}
LINEAR = ("linear", "linear_tokens", "linear_rank5", "linear_no_bias", "conv1d_transformers", "repeated_and_tied",
          "folded", "attention", "attention_weights", "attention_cross", "attention_extras", "attention_separate",
          "encoder_layer", "prefixed")  # fmt: skip


@pytest.mark.parametrize("method", FULL_RANK, ids=str)
@pytest.mark.parametrize("case", [*LINEAR, *MORE])
def test_rule_equals_batch_of_one(case: str, method: Method, calls: list[int]) -> None:
    make, batch = (CASES | MORE)[case]
    torch.manual_seed(3)
    assert_per_sample_gradients(make().double(), method, batch, B, loss)
    assert bool(calls) == (case != "prefixed")  # a layer inside vmap leaves products


class Net(nn.Module):
    """Everything at once: an embedding tied to the head, Conv1D, attention, a layer called twice, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.wide = nn.Embedding(20, 8), nn.Linear(8, 8), Conv1D(16, 8)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.narrow = nn.LayerNorm(16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, token: Tensor) -> Tensor:
        x = self.wide(self.mix(self.mix(self.embed(token)).tanh()))
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.narrow(x))


def clipped_sum(
    on: bool, method: Method, clipping: str, token: Tensor, scales: Tensor | None = None, **options: Any
) -> tuple[Tensor, list[list[Any]]]:
    """The clipped sum of a batch, and what it was made of. Each sample's loss has a weight."""
    torch.manual_seed(0)
    model = Net().double()
    with factored(on):
        engine, optimizer, _ = attach(model, method, max_grad_norm=0.7, clipping=clipping, **options)
        losses = model(token).square().flatten(1).mean(1)
        (losses if scales is None else losses * scales).mean().backward()
        made = engine._recorder.per_sample()
        optimizer.gradients.collect(None)
        engine.detach()
    vector: Tensor = optimizer.gradients.sum.vector
    return vector, made


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize(
    "method", [*FULL_RANK, DPSGD(head_scale=0.1), SparseDPSGD(sparsity=0.9, head_scale=3.0)], ids=str
)
def test_clipped_sums_are_those_of_explicit_gradients(method: Method, clipping: str) -> None:
    token = tokens(20, B, 6)
    wanted, explicit = clipped_sum(False, method, clipping, token)
    found, made = clipped_sum(True, method, clipping, token)
    kinds = [type(parts[0]) for parts in made]
    assert OuterProducts not in [type(parts[0]) for parts in explicit]
    # mix, wide, the two of attention, narrow; the head's is tied to an embedding, which has no factors
    assert kinds.count(OuterProducts) == 5 and kinds.count(Tensor) == len(kinds) - 5
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("method", FULL_RANK, ids=str)
def test_a_samples_share_is_at_most_the_bound_and_a_broken_one_has_none(method: Method, clipping: str) -> None:
    token = tokens(20, B, 6)
    scales = torch.tensor([1e-6, 1.0, 1e6, 1e3, 1.0], dtype=torch.float64)
    whole, _ = clipped_sum(True, method, clipping, token, scales)
    for i in range(B):
        rest = [j for j in range(B) if j != i]
        alone, _ = clipped_sum(True, method, clipping, token[[i]], scales[[i]])
        without, _ = clipped_sum(True, method, clipping, token[rest], scales[rest])
        assert float(alone.norm()) <= 0.7 * (1 + 1e-6)
        assert float((whole - without).norm()) <= 0.7 * (1 + 1e-6)
        for value in (math.nan, math.inf):
            broken, _ = clipped_sum(True, method, clipping, token, scales.index_fill(0, torch.tensor([i]), value))
            torch.testing.assert_close(broken, without)


@pytest.mark.parametrize("kind", ["attention", "conv1d", "linear"])
def test_split_query_key_value(kind: str, calls: list[int]) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "attention":
                self.layer: nn.Module = nn.MultiheadAttention(12, 2, batch_first=True)
            else:
                self.layer = Conv1D(36, 12) if kind == "conv1d" else nn.Linear(12, 36)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x, x, x)[0] if kind == "attention" else self.layer(x)

    model, x = Fused().double(), normal(B, 3, 12)
    name = "layer.in_proj_weight" if kind == "attention" else "layer.weight"
    wanted = batch_of_one_gradients(model, x, B, loss)[name].chunk(3, dim=2 if kind == "conv1d" else 1)
    # Thirds of a rank that would not be smaller stay dense.
    engine, _, _ = attach(model, LSG(rank=12, sparsity=0.0, fused_qkv="split"))
    loss(model, x).backward()
    found = engine.per_sample_gradients()
    assert calls.count(12) >= 3
    for i, third in enumerate(wanted):
        slot = engine._recorder.slots[f"{name}[{i}]"]
        assert isinstance(slot.parts()[0], OuterProducts) and slot.subspace is None
        torch.testing.assert_close(found[f"{name}[{i}]"], third)
        torch.testing.assert_close(slot.parts()[0].row_norms() * B, third.flatten(1).norm(dim=1))


def small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def test_other_derivatives_leave_nothing(calls: list[int]) -> None:
    """Gradients of an input run the same backward of the layer, and are not the weight's."""
    model, x = small(), normal(4, 6).requires_grad_()
    engine, optimizer, _ = attach(model, DPSGD())
    value = model(x).square().sum()
    torch.autograd.grad(value, x, retain_graph=True)
    assert not optimizer.gradients.pending()
    value.backward()
    once = engine.per_sample_gradients()["0.weight"]
    optimizer.zero_grad()
    assert not optimizer.gradients.pending()
    value = model(x).square().sum()
    value.backward(retain_graph=True)
    value.backward()
    torch.testing.assert_close(engine.per_sample_gradients()["0.weight"], 2 * once)
    assert isinstance(engine._recorder.slots["0.weight"].parts()[0], OuterProducts)


def test_a_backward_after_zero_grad_counts_once_and_one_after_the_next_batch_not_at_all(calls: list[int]) -> None:
    model = small()
    engine, optimizer, loader = attach(model, DPSGD(), poisson_sampling=False)
    x, other = normal(4, 6), normal(4, 6).flip(0)
    model(x).square().sum().backward()
    wanted = engine.per_sample_gradients()["2.weight"]
    optimizer.zero_grad()
    late = model(x).square().sum()
    late.backward(retain_graph=True)
    optimizer.zero_grad()
    late.backward(retain_graph=True)
    torch.testing.assert_close(engine.per_sample_gradients()["2.weight"], wanted)
    optimizer.zero_grad()
    next(iter(loader))  # a batch goes out: what came before it must not reach it
    assert not optimizer.gradients.pending()
    late.backward(retain_graph=True)
    assert not optimizer.gradients.pending()
    model(other).square().sum().backward()
    alone = engine.per_sample_gradients()["2.weight"]
    late.backward()
    torch.testing.assert_close(engine.per_sample_gradients()["2.weight"], alone)
    assert not torch.allclose(alone, wanted)


def test_a_batch_of_another_size_is_out_of_reach_of_the_last_one(calls: list[int]) -> None:
    model = small()
    engine, optimizer, _ = attach(model, DPSGD())
    late = model(normal(4, 6)).square().sum()
    model(normal(3, 6)).square().sum().backward()
    wanted = engine.per_sample_gradients()["0.weight"]
    late.backward()
    torch.testing.assert_close(engine.per_sample_gradients()["0.weight"], wanted)
    assert wanted.shape == (3, 8, 6)
    with pytest.raises(PrivacyError, match="another number of samples"):  # but whoever wanted both is told
        optimizer.step()


def test_an_input_written_over_before_the_step_is_refused(calls: list[int]) -> None:
    model, x = small(), normal(4, 6)
    _, optimizer, _ = attach(model, DPSGD())
    model(x).square().sum().backward()
    x.copy_(normal(4, 6).flip(0))  # the next batch, in the same memory
    with pytest.raises(PrivacyError, match=r"'0\.weight' was changed in place"):
        optimizer.step()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def test_forwards_without_a_backward_pile_nothing_up(calls: list[int]) -> None:
    model = small()
    engine, _, _ = attach(model, DPSGD())
    for _ in range(3):
        model(normal(4, 6))
    assert all(slot.calls.inputs == {} and slot.calls.made is None for slot in engine._recorder.slots.values())


def test_the_independence_check_leaves_nothing_and_still_sees_what_mixes(calls: list[int]) -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x)
            return self.second(hidden - hidden.mean(0))

    mixes = Mixes().double()
    attach(mixes, DPSGD())
    with pytest.raises(PrivacyError, match="layer 'second'"):
        mixes(normal(4, 6))
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
    engine, optimizer, _ = attach(model, DPSGD())
    model(normal(4, 6))
    assert engine._attached.attachment._checked._finished and not optimizer.gradients.pending()


@pytest.mark.parametrize("method", FULL_RANK, ids=str)
def test_rows_of_padding_never_enter(method: Method, calls: list[int]) -> None:
    torch.manual_seed(0)
    model = small()
    engine, optimizer, _ = attach(model, method, max_grad_norm=0.5)
    recorder = engine._recorder
    recorder._pads, recorder._largest_batch = True, 8
    x = normal(5, 6)
    model(x).square().sum(1).mean().backward()
    part = recorder.slots["0.weight"].parts()[0]
    assert isinstance(part, OuterProducts) and part.shape[0] == 6
    part.rows[5:] = 1e3  # as if padding had got gradients
    part.columns.data[5:] = math.nan
    optimizer.gradients.collect(5)
    found = optimizer.gradients.sum.vector
    with factored(False):
        torch.manual_seed(0)
        _, plain, _ = attach(twin := small(), method, max_grad_norm=0.5)
        twin(x).square().sum(1).mean().backward()
        plain.gradients.collect(5)
    torch.testing.assert_close(found, plain.gradients.sum.vector)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_pair_in_its_precision_and_sums_in_float32(dtype: torch.dtype, calls: list[int]) -> None:
    model, x = small().float(), normal(4, 6).float()
    engine, optimizer, _ = attach(model, DPSGD(), max_grad_norm=1.0)
    with torch.autocast("cpu", dtype=dtype):
        y = model(x)
        y.float().square().sum(1).mean().backward()
        found = engine.per_sample_gradients()["0.weight"]  # autocast rounds no product here
    part = engine._recorder.slots["0.weight"].parts()[0]
    assert part.rows.dtype == part.columns.dtype == dtype and part.dtype == torch.float32
    explicit = 4 * torch.einsum("bto,bti->boi", part.rows.double(), part.columns.double())
    torch.testing.assert_close(found.double(), explicit, rtol=1e-6, atol=1e-7)
    optimizer.step()
    assert model[0].weight.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own compiler
def test_compiled_models_leave_products(calls: list[int]) -> None:
    model = small()
    engine, _, _ = attach(model, DPSGD())
    torch.compile(model, backend="aot_eager")(normal(4, 6)).square().sum().backward()
    slot = engine._recorder.slots["0.weight"]
    assert slot.pending and isinstance(slot.parts()[0], Tensor)


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("method", FULL_RANK, ids=str)
def test_a_run_that_runs_out_of_memory_ends_as_one_that_does_not(method: Method, where: str) -> None:
    def end(on: bool, fits: int) -> Tensor:
        with factored(on):
            model, optimizer, loader, _ = parts(Gpu(fits, where), method)
            backward = BackwardInPieces(model, optimizer, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))
            for batch in loader:
                backward(batch)
                optimizer.step()
        assert backward.largest is None or fits < 100
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    wanted = end(False, 10**9)
    for fits in (10**9, 5):
        assert torch.allclose(end(True, fits), wanted, atol=1e-5)


@pytest.mark.parametrize("method", ["dpsgd", "sparse"])
def test_a_run_goes_on_from_a_checkpoint_in_the_middle_of_a_batch(method: str, tmp_path: Any, calls: list[int]) -> None:
    torch.manual_seed(5)
    whole = Training(method).finish()
    torch.manual_seed(5)
    stopped = Training(method)
    stop_at(stopped, "micro-batches")
    stopped.save(tmp_path / "state")
    again = Training(method, seed=9).load(tmp_path / "state").finish()
    assert again.result() == whole.result() and again.trace == whole.trace and calls


def test_a_weight_that_is_tied_has_the_norm_of_the_sum(calls: list[int]) -> None:
    """The uses of a tied weight are one vector of a sample: their norm is not that of the parts."""
    model = Repeated().double()
    engine, _, _ = attach(model, DPSGD())
    x = tokens(20, B, 6)
    loss(model, x).backward()
    wanted = batch_of_one_gradients(model, x, B, loss)
    slots = engine._recorder.slots
    # mix is called twice: the products of all its tokens. The head is an embedding too: explicit.
    part = slots["mix.weight"].parts()[0]
    assert isinstance(part, OuterProducts) and part.rows.shape[1] == 12
    torch.testing.assert_close(B * part.row_norms(), wanted["mix.weight"].flatten(1).norm(dim=1))
    tied = slots["embed.weight"].parts()[0]
    assert isinstance(tied, Tensor)
    torch.testing.assert_close(B * tied.norm(dim=1), wanted["embed.weight"].flatten(1).norm(dim=1))
