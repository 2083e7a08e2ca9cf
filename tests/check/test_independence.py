"""The check that samples do not mix: what it finds, and that it needs little more memory than a training step."""

import weakref
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lsg import DPSGD, PrivacyError
from tests.support.reference import attach


class PeakMemory(TorchDispatchMode):
    """Bytes in tensors made since, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now -= size


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize(
    ("model", "most"),
    [
        (nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU()))), 1.5),
        (Checkpointed(), 2.5),  # the check holds all carriers' gradients at once, beside little else
    ],
)
def test_the_check_needs_little_more_memory_than_a_training_step(model: nn.Module, most: float) -> None:
    x = torch.randn(32, 128, 64)
    attach(model, DPSGD())
    peaks = []
    for _ in range(2):  # the first batch is checked
        with PeakMemory() as memory:
            model(x).sum().backward()
        peaks.append(memory.peak)
        for parameter in model.parameters():
            parameter.grad = None
    checked, plain = peaks
    assert checked < most * plain


class DeadEnd(nn.Module):
    """Mixes samples on a way that does not lead to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.aside = self.side(x - x.mean(0))
        return self.last(x)


def mixed(x: Tensor) -> Tensor:
    return x - x.mean(0)


class Mixing(nn.Module):
    """Mixes samples and meets what is mixed in layer 'side', in a way that is given by name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.side, self.last, self.how = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Any:
        h = mixed(self.first(x))
        return getattr(self, self.how)(h)

    def view_written_to(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # the layer keeps a cast, so that writing is allowed
            view = h.view_as(h)
            loss = self.side(view).float().square().mean()
            view += 1
        return loss

    def base_written_to(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.side(h.view_as(h)).float().square().mean()
            h += 1
        return loss

    def detached_later(self, h: Tensor) -> Tensor:
        y = self.side(h)
        h.detach_()
        return y.sum()

    def opposites(self, h: Tensor) -> Tensor:
        return (self.side(h).square() + self.side(-h)).sum()

    def checkpointed(self, h: Tensor) -> Tensor:
        return checkpoint(self.side, h, use_reentrant=False)

    def compiled(self, h: Tensor) -> Tensor:
        return torch.compile(self.side, backend="eager", fullgraph=True)(h)

    def view_met_before_and_after_writing(self, h: Tensor) -> Tensor:
        clean = self.first(h.detach())
        view = clean.view_as(clean)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.last(view).float().square().mean()
            clean -= mixed(clean) - clean  # from here on the view has it, too
            return y + self.side(view).float().square().mean()


WAYS = ["view_written_to", "base_written_to", "detached_later", "opposites", "checkpointed", "compiled"]
WAYS += ["view_met_before_and_after_writing"]


@pytest.mark.parametrize("way", WAYS)
def test_mixing_is_found_whatever_becomes_of_the_tensor(way: str) -> None:
    model = Mixing(way)
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match=r"before layer '(side|first)'"):  # 'first' where it gets it detached
        model(torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore")  # PyTorch's own compiler warns of itself
@pytest.mark.parametrize("way", WAYS)
def test_the_same_without_mixing_passes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "mixed", lambda x: x * 2.0)
    model = Mixing(way)
    reduction = "sum" if way in ("detached_later", "opposites") else "mean"  # as the model itself does it
    _, optimizer, _ = attach(model, DPSGD(), loss_reduction=reduction)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()


def test_outputs_that_add_up_to_a_constant_hide_nothing() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            p = torch.sigmoid(mixed(self.layer(x)))
            return p, 1 - p

    model = Pair()
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match="the model's output"):
        model(torch.randn(4, 6))


class Gated(nn.Module):
    """One view of a tensor is written to before a layer takes the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        values, gates = h[..., :3], h[..., 3:]
        gates.sigmoid_()
        return self.last(values) * gates


class Branching(nn.Module):
    """Needs a compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("doubles", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(torch.cond(self.doubles > 0, lambda h: h * 2.0, lambda h: h * 3.0, (h,)))


@pytest.mark.filterwarnings("ignore")  # PyTorch's own compiler warns of itself
@pytest.mark.parametrize("model", [Gated(), Branching()])
def test_models_that_keep_samples_apart_pass(model: nn.Module) -> None:
    _, optimizer, _ = attach(model, DPSGD())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [2, 33, 128])
def test_one_sample_that_takes_its_neighbours_softmax_is_found(dtype: torch.dtype, size: int) -> None:
    class Neighbour(nn.Module):
        def __init__(self, taker: int) -> None:
            super().__init__()
            self.layer, self.taker = nn.Linear(6, 2, dtype=dtype), taker

        def forward(self, x: Tensor) -> Tensor:
            order = torch.arange(len(x))
            order[self.taker] = (self.taker + 1) % len(x)
            return self.layer(x)[order].softmax(-1)

    for taker in range(0, size, 5):
        model = Neighbour(taker)
        attach(model, DPSGD())
        with pytest.raises(PrivacyError, match="the model's output"):
            model(torch.randn(size, 6, dtype=dtype))


@dataclass
class Result:
    values: Tensor


@pytest.mark.parametrize("wrap", [Result, lambda t: {"a": [UserDict(b=t)]}, lambda t: torch.complex(t.detach(), t)])
def test_outputs_are_found_wherever_they_are(wrap: Any) -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return wrap(mixed(self.layer(x)))

    model = Wrapping()
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match="the model's output"):
        model(torch.randn(4, 6))


def test_mixing_in_training_alone_is_found_after_a_forward_in_evaluation() -> None:
    class InTraining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return mixed(y) if self.training else y

    model = InTraining()
    attach(model, DPSGD())
    model.eval()(torch.randn(4, 6))
    with pytest.raises(PrivacyError, match="influence each other"):
        model.train()(torch.randn(4, 6))


def test_mixing_is_found_where_it_leads_nowhere() -> None:
    model = DeadEnd()
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match="layer 'side'"):
        model(torch.randn(4, 6))


def test_a_broken_sample_is_no_evidence_and_hides_none() -> None:
    x = torch.randn(4, 6)
    x[1] = torch.nan
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    attach(model, DPSGD())
    assert model(x).shape == (4, 6)
    mixing = DeadEnd()
    x[1], x[2, 0] = 1.0, torch.inf
    attach(mixing, DPSGD())
    with pytest.raises(PrivacyError, match="influence each other"):
        mixing(x)


def test_the_check_leaves_no_hook_on_an_input_that_wants_its_gradient() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(4, 6, requires_grad=True)
    attach(model, DPSGD())
    first, second = (torch.autograd.grad(model(x).sum(), x)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not x._backward_hooks


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return mixed(x)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


IN_FRONT = {
    "of the inputs": (lambda: nn.Sequential(Centre(), nn.Linear(6, 6)), torch.randn(5, 6), "before layer '1'"),
    "behind frozen layers": (
        lambda: nn.Sequential(frozen(nn.Linear(6, 6)), nn.Tanh(), Centre(), nn.Linear(6, 6)),
        torch.randn(5, 6),
        "before layer '3'",
    ),
    "of frozen embeddings": (
        lambda: nn.Sequential(frozen(nn.Embedding(9, 6)), Centre(), nn.Linear(6, 6)),
        torch.arange(15).view(5, 3) % 9,
        "before layer '2'",
    ),
}


@pytest.mark.parametrize("where", IN_FRONT)
def test_mixing_in_front_of_the_first_trained_layer_is_found(where: str) -> None:
    make, x, culprit = IN_FRONT[where]
    model = make()
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match=culprit):
        model(x)


class OwnBatchNorm(nn.Module):
    """Sample by sample it would compute something else, and mix nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return mixed(x) / (x.std(0) + 1e-5) * self.weight


@pytest.mark.parametrize("first", [nn.Linear(6, 6), nn.Identity()])
def test_a_batch_norm_written_by_hand_is_refused_by_name(first: nn.Module) -> None:
    model = nn.Sequential(first, OwnBatchNorm(), nn.Linear(6, 2))
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match=r"in layer '1' \(OwnBatchNorm\)"):
        model(torch.randn(2 + 4, 6))


class Weighted(nn.Module):
    """Takes weights that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return weights @ x * self.scale


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weighted = nn.Linear(6, 6), Weighted()

    def forward(self, x: Tensor) -> Tensor:
        return self.weighted(self.first(x), torch.ones(x.shape[1], x.shape[1]).tril())


@pytest.mark.parametrize("size", [3, 4])
def test_an_argument_that_samples_share_may_have_as_many_rows_as_there_are_samples(size: int) -> None:
    model, x = Causal(), torch.randn(size, 4, 6)
    wanted = model(x)
    attach(model, DPSGD())
    assert torch.allclose(model(x), wanted)


class Reentrant(nn.Module):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 6), between), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=True))


def test_a_reentrant_checkpoint_hides_nothing_from_the_check() -> None:
    model = Reentrant(Centre())
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match="before layer 'head'"):
        model(torch.randn(5, 6))
    fine = Reentrant(nn.Tanh())
    engine, _, _ = attach(fine, DPSGD())
    fine(torch.randn(5, 6)).sum().backward()
    assert all(bool(gradient.any()) for gradient in engine.per_sample_gradients().values())


def test_a_model_that_writes_to_its_inputs_is_checked_and_trained() -> None:
    class Writes(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x *= 2
            return super().forward(x)

    model = Writes(nn.Linear(6, 6))
    attach(model, DPSGD())
    x = torch.ones(5, 6)
    model(x).sum().backward()
    assert bool((x == 2).all())


class Keeps(nn.Module):
    """Keeps a state as large as its batch, a count and its last input; a running mean of its inputs, if asked to."""

    def __init__(self, *, statistics: bool = False) -> None:
        super().__init__()
        self.layer, self.state, self.count, self.statistics = nn.Linear(6, 6), None, 0, statistics
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls.add_(1)
        self.state = torch.zeros_like(x) if self.state is None else self.state
        y = self.layer(x - self.mean) * self.calls + self.state
        if self.statistics:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        self.last = x
        return y


def test_what_a_model_keeps_is_as_after_one_forward() -> None:
    model, x = Keeps(), torch.randn(9, 6)
    _, optimizer, _ = attach(model, DPSGD())
    for number in range(2):
        model(x).sum().backward()
        optimizer.step()
        assert model.count == model.calls == number + 1 and model.last is x


def test_statistics_of_the_data_in_a_buffer_are_refused() -> None:
    model = Keeps(statistics=True)
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match="keeps 'mean', computed from the records"):
        model(torch.randn(9, 6))


@pytest.mark.parametrize("layers", [4, 7, 8])
@pytest.mark.parametrize("size", [5, 6, 9, 32])
def test_outputs_that_are_not_batch_first_are_told_from_samples_by_their_number(layers: int, size: int) -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([layer(x) for layer in self.layers])

    model = Stacked()
    attach(model, DPSGD())
    assert model(torch.randn(size, 6)).shape == (layers, size, 6)


@pytest.mark.parametrize("size", [3, 6, 9])
def test_an_input_that_samples_share_may_have_as_many_rows(size: int) -> None:
    class Masked(nn.Module):
        def __init__(self, *, mixes: bool) -> None:
            super().__init__()
            self.layer, self.mixes = nn.Linear(6, 6), mixes

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x @ x.mT + (mixed(mask) if self.mixes else mask)).softmax(-1) @ self.layer(x)

    model = Masked(mixes=False)
    attach(model, DPSGD())
    assert model(torch.randn(size, size, 6), torch.zeros(size, size)).shape == (size, size, 6)
    model = Masked(mixes=True)
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match="influence each other"):  # through the second input, a sample's own
        model(torch.randn(size, 4, 6), torch.randn(size, 4, 4))


@dataclass
class Record:
    x: Tensor


@pytest.mark.parametrize("wrap", [lambda x: {"x": x}, lambda x: UserDict(x=x), Record])
def test_inputs_in_mappings_and_dataclasses_are_looked_at(wrap: Any) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, inputs: Any) -> Tensor:
            return self.layer(mixed(inputs.x if isinstance(inputs, Record) else inputs["x"]))

    model = Takes()
    engine, _, _ = attach(model, DPSGD())
    engine._recorder.prepare(5)  # of a dataclass nobody knows the size
    with pytest.raises(PrivacyError, match="before layer 'layer'"):
        model(wrap(torch.randn(5, 6)))


def test_models_that_refuse_nan_are_trained() -> None:
    """The check makes a record NaN, which a distribution does not take."""

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

        def forward(self, x: Tensor) -> Tensor:
            mean, spread = self.encoder(x).chunk(2, 1)
            return self.decoder(Normal(mean, spread.clamp(-5, 5).exp()).rsample())

    model = Autoencoder()
    _, optimizer, _ = attach(model, DPSGD())
    model(torch.randn(8, 6)).square().mean(1).mean().backward()
    optimizer.step()


class TakesItsNeighbour(nn.Module):
    """The first record takes the second's value. Records of one token alone are refused, which the check tries."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(22))  # no small model, of which more is tried

    def forward(self, ids: Tensor) -> Tensor:
        if (ids == ids[:, :1]).all(1).any():
            raise ValueError("a record of one token alone")
        h = self.table(ids).mean(1)
        h = torch.cat([h[:1] + h[1:2].detach(), h[1:]])
        for layer in self.layers:
            h = layer(h).tanh()
        return h


def test_a_model_that_refuses_odd_records_is_tried_with_others() -> None:
    model = TakesItsNeighbour()
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match=r"before layer 'layers\.0'"):
        model(torch.randint(1, 30, (8, 6)))


class RoundsByNumber(nn.Module):
    """A layer norm's float32 after a product in bfloat16, which a batch of another size rounds in another way."""

    def __init__(self, off: float) -> None:
        super().__init__()
        self.first, self.last, self.off = nn.Linear(8, 8), nn.Linear(8, 2), off

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).float()
        return self.last(hidden * (1 + self.off * (len(x) % 2)))


@pytest.mark.parametrize(("lowered", "off", "passes"), [(True, 0.01, True), (False, 0.01, False), (True, 0.5, False)])
def test_rounding_of_lower_precision_is_no_influence_and_hides_none(lowered: bool, off: float, passes: bool) -> None:
    model = RoundsByNumber(off)
    attach(model, DPSGD())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lowered):
        if passes:
            model(torch.randn(7, 8))
        else:
            with pytest.raises(PrivacyError, match=r"how many others there are|something else for a sample than among"):
                model(torch.randn(7, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_divided_by_the_number_of_samples_are_found_in_any_precision(dtype: torch.dtype) -> None:
    class Divided(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input / len(input))

    model = nn.Sequential(Divided(8, 8), nn.Linear(8, 2)).to(dtype)
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match="how many others there are"):
        model(torch.randn(7, 8, dtype=dtype))


@pytest.mark.parametrize(("records", "length"), [(2, 3), (4, 3), (3, 4)])
def test_indices_with_the_batch_second_are_found_where_they_are_as_long_as_the_few_records(
    records: int, length: int
) -> None:
    """Positions that are the same by chance, as indices are, were taken for records that nothing had changed."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embed(x.T)).transpose(0, 1)

    for seed in range(8):
        model, generator = Turned(), torch.Generator().manual_seed(seed)
        attach(model, DPSGD())
        model(torch.randint(0, 9, (records, length), generator=generator)).sum().backward()
