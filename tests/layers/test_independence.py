"""The check that samples do not mix: what it finds, and that it needs little more memory than a training step."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lsg import DPSGD, PrivacyError
from tests.reference import attach


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


def test_the_check_needs_little_more_memory_than_a_training_step() -> None:
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(16, 128, 64)
    attach(model, DPSGD())
    peaks = []
    for _ in range(2):  # the first batch is checked
        with PeakMemory() as memory:
            model(x).sum().backward()
        peaks.append(memory.peak)
        for parameter in model.parameters():
            parameter.grad = None
    checked, plain = peaks
    assert checked < 1.5 * plain


class DeadEnd(nn.Module):
    """Mixes samples on a way that does not lead to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.aside = self.side(x - x.mean(0))
        return self.last(x)


def test_mixing_is_found_wherever_a_layer_meets_it() -> None:
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
