"""Subclasses of known layers with a forward of their own: what the interception takes, leaves alone and refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg import DPSGD, LSG, PrivacyError
from tests.layers.test_rules import EqualisedLinear, ScaledEmbedding
from tests.support.reference import assert_per_sample_gradients, attach, batch_of_one_gradients

B = 4
METHODS = (LSG(rank=2, sparsity=0.5), DPSGD())


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.flatten(1).square().mean(1).mean()


class Constrained(nn.Linear):
    """Reads and rewrites its weight's values, and computes as its parent does."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        assert torch.isfinite(self.weight).all()
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        with torch.no_grad():
            self.length = self.weight.norm().item()
        return super().forward(x)


class ShiftedEmbedding(nn.Embedding):
    """A table that may be frozen, and a parameter beside it."""

    def __init__(self) -> None:
        super().__init__(20, 6)
        self.shift = nn.Parameter(torch.randn(6))
        self.weight.requires_grad_(False)

    def forward(self, token: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(token) + self.shift


class PaddedEmbedding(nn.Embedding):
    """Names the padding row in the call alone."""

    def forward(self, token: Tensor) -> Tensor:  # type: ignore[override]
        return F.embedding(token, self.weight * 2, padding_idx=3)


class TwoNames(nn.Linear):
    """One parameter, two names."""

    def __init__(self) -> None:
        super().__init__(8, 5)
        self.same = self.weight

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(x, self.weight + self.same, self.bias)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("make", [Constrained, PaddedEmbedding, TwoNames], ids=lambda m: m.__name__)
def test_per_sample_gradients(make: Any, method: Any) -> None:
    torch.manual_seed(0)
    model = (make() if make is TwoNames else make(20, 8)).double()
    tokens = isinstance(model, nn.Embedding)
    x = torch.randint(6, (B, 7)) if tokens else torch.randn(B, 3, model.in_features).double()
    assert_per_sample_gradients(model, method, x, B, mean_loss)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_frozen_table_beside_a_trained_parameter(method: Any) -> None:
    torch.manual_seed(0)
    model, x = ShiftedEmbedding().double(), torch.randint(20, (B, 7))
    wanted = batch_of_one_gradients(model, x, B, mean_loss)["shift"]
    engine, *_ = attach(model, method)
    mean_loss(model, x).backward()
    found = engine.per_sample_gradients()
    assert found.keys() == {"shift"}
    torch.testing.assert_close(found["shift"], wanted)


class Positions(nn.Module):
    """Positions that all samples share, looked up in something else than a table's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position, self.head = nn.Embedding(20, 6), ScaledEmbedding(9, 6), nn.Linear(6, 1)

    def forward(self, token: Tensor) -> Tensor:
        return self.head((self.token(token) + self.position(torch.arange(token.shape[1]))).tanh())


class DroppedPositions(Positions):
    """With random values no output can be compared, but its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.position = DroppedEmbedding(9, 6)


class DroppedEmbedding(ScaledEmbedding):
    def forward(self, token: Tensor) -> Tensor:  # type: ignore[override]
        return F.dropout(super().forward(token), 0.5, self.training)


class Masked(EqualisedLinear):
    """Takes a second input that all samples share."""

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * factor


class SharedFactor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masked = Masked(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.masked(x, torch.arange(1.0, 1 + x.shape[1]).unsqueeze(1))


class Fickle(nn.Linear):
    """Uses its weight in two ways."""

    plain = True

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(x, self.weight if self.plain else self.weight * 2, self.bias)


@pytest.mark.parametrize(("make", "shape"), [(Positions, (B, 6)), (SharedFactor, (B, B, 8))])
def test_what_samples_share_is_found_by_value(make: Any, shape: tuple[int, ...]) -> None:
    x = torch.randint(20, shape) if make is Positions else torch.randn(shape, dtype=torch.float64)
    assert_per_sample_gradients(make().double(), DPSGD(), x, B, mean_loss)


def test_what_samples_share_may_be_dropped_at_random() -> None:
    model = DroppedPositions()
    _, optimizer, _ = attach(model, DPSGD())
    mean_loss(model, torch.randint(20, (B, 6))).backward()
    optimizer.step()


def test_another_use_after_the_first_batch_is_refused() -> None:
    model = nn.Sequential(Fickle(8, 8), nn.Linear(8, 2))
    attach(model, DPSGD())
    mean_loss(model, torch.randn(B, 8))
    model[0].plain = False
    with pytest.raises(PrivacyError, match="in another way than before"):
        mean_loss(model, torch.randn(B, 8))


def test_hooks_run_once() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(EqualisedLinear(8, 8), nn.Linear(8, 2)), torch.randn(B, 8)
    model[0].register_forward_hook(lambda module, args, output: output * 10)
    wanted = model(x)
    attach(model, DPSGD())
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("factor", [1, 2])
def test_lookups_that_depend_on_the_batch_are_refused(options: dict[str, Any], factor: int) -> None:
    class Lookup(nn.Embedding):
        def forward(self, token: Tensor) -> Tensor:  # type: ignore[override]
            return F.embedding(token, self.weight if factor == 1 else self.weight * factor, **options)

    model = nn.Sequential(Lookup(20, 6), nn.Linear(6, 2))
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match=f"'0' looks up with {next(iter(options))}"):
        mean_loss(model, torch.randint(20, (B, 6)))


def test_weights_in_half_precision_stay_in_it() -> None:
    model = nn.Sequential(EqualisedLinear(8, 8), nn.Linear(8, 2)).bfloat16()
    engine, *_ = attach(model, LSG(rank=2, sparsity=0.5))
    y = model(torch.randn(B, 8).bfloat16())
    y.float().square().mean().backward()
    assert y.dtype is torch.bfloat16 and "0.weight" in engine.per_sample_gradients()
