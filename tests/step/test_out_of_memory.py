"""Out of memory in a micro-batch: tried again smaller, the same step, nothing skipped, nothing twice."""

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, LSG, NonPrivate, PrivacyEngine, PrivacyError
from lsg.errors import ConfigurationError, LsgError, OutOfMemory
from lsg.methods import Method
from lsg.model.inputs import batch_size
from lsg.parameters.refresh import Refresh
from lsg.step.clipping import Clipper
from lsg.step.out_of_memory import BackwardInPieces, is_out_of_memory, rows
from lsg.train.loop import Epoch, train

RECORDS, BATCH, DELTA = 60, 20, 1e-3


class Gpu(nn.Module):
    """A model that runs out of memory for more samples than fit, on the way there or on the way back."""

    def __init__(self, fits: int = 10**9, where: str = "forward") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
        self.fits, self.where = fits, where
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            self._allocate(len(x))
        out: Tensor = self.body[3](self._watched(self.body[:3](x)))  # the head has its gradient when backward fails
        return out

    def _watched(self, hidden: Tensor) -> Tensor:
        if self.where == "backward" and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._allocate(len(gradient)))
        return hidden

    def _allocate(self, size: int) -> None:
        if size > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        self.sizes.append(size)


def parts(model: nn.Module, method: Method | None = None, **options: Any) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(RECORDS, 8, generator=generator), torch.randint(0, 3, (RECORDS,), generator=generator)
    engine = PrivacyEngine(accountant="rdp")
    settings = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "noise_generator": torch.Generator().manual_seed(1),
        "max_physical_batch_size": 16,
    }
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH),
        method=method or LSG(rank=2, sparsity=0.5),
        **settings | options,
    )
    return (*made, engine)


def trained(model: nn.Module, *arguments: Any, **options: Any) -> tuple[Tensor, list[Epoch], PrivacyEngine]:
    *made, engine = parts(model, *arguments, **options)
    history = train(*made, engine, epochs=2, delta=DELTA)
    return nn.utils.parameters_to_vector(model.parameters()).detach(), history, engine


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("fits", [1, 5, 9])
def test_a_run_that_runs_out_of_memory_ends_as_one_that_does_not(fits: int, where: str) -> None:
    wanted, whole, engine = trained(Gpu(where=where))
    model = Gpu(fits, where)
    found, pieces, smaller = trained(model)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert smaller.accountant.history == engine.accountant.history and len(engine.accountant) == 6
    assert [e.samples for e in pieces] == [e.samples for e in whole]
    assert [e.loss for e in pieces] == pytest.approx([e.loss for e in whole], rel=1e-5)
    assert [e.steps for e in pieces] == [e.steps for e in whole] == [3, 6]
    assert max(model.sizes) <= fits


def test_the_smaller_size_is_kept_and_said_once() -> None:
    model = Gpu(5)
    with pytest.warns(UserWarning, match="memory ran out") as said:
        trained(model)
    texts = [str(warning.message) for warning in said if "memory ran out" in str(warning.message)]
    assert len(texts) == len(set(texts)) <= 3 and "max_physical_batch_size=4" in texts[-1]
    assert max(model.sizes) <= 5 and model.sizes.count(4) > 5


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("method", [LSG(rank=2), DPSGD(), NonPrivate()], ids=str)
def test_every_method_and_reduction(method: Method, reduction: str) -> None:
    noise = 0.0 if isinstance(method, NonPrivate) else 1.0
    ends = []
    for fits in (10**9, 3):
        model = Gpu(fits)
        model, optimizer, loader, _ = parts(model, method, noise_multiplier=noise, loss_reduction=reduction)
        backward = BackwardInPieces(
            model, optimizer, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction=reduction)
        )
        losses = []
        for batch in loader:
            losses.append(float(backward(batch)))
            optimizer.step()
        assert backward.largest == (None if fits > RECORDS else backward.largest) and (backward.largest or 0) <= 3
        ends.append((nn.utils.parameters_to_vector(model.parameters()).detach(), torch.tensor(losses)))
    assert torch.allclose(ends[0][0], ends[1][0], atol=1e-5)
    assert torch.allclose(ends[0][1], ends[1][1], rtol=1e-4)


def failing_once(function: Callable[..., Any], when: int) -> Callable[..., Any]:
    calls: Iterator[int] = iter(range(10**9))

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if next(calls) == when:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
        return result

    return wrapper


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.parametrize("place", [(Clipper, "clip"), (Refresh, "_run")], ids=["clipping", "refresh"])
def test_memory_may_run_out_in_clipping_or_in_making_subspaces(
    place: tuple[type, str], when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(Gpu())[0]
    monkeypatch.setattr(*place, failing_once(getattr(*place), when))
    assert torch.allclose(trained(Gpu())[0], wanted, atol=1e-5)


def test_a_sample_too_large_by_itself_is_a_clear_error_and_nothing_is_spent() -> None:
    *made, engine = parts(Gpu(0))
    with pytest.raises(OutOfMemory, match="max_physical_batch_size=1"), pytest.warns(UserWarning):
        train(*made, engine, epochs=1, delta=DELTA)
    assert issubclass(OutOfMemory, LsgError)
    assert len(engine.accountant) == 0 and not made[1].gradients.pending() and made[1].gradients.sum is None


def test_other_errors_are_not_caught() -> None:
    *made, engine = parts(Gpu())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(*made, engine, epochs=1, delta=DELTA, loss=loss)


def test_parts_that_do_not_add_up_are_refused() -> None:
    model, optimizer, loader, engine = parts(Gpu())

    def backward(x: Tensor) -> None:
        model(x).square().sum(1).mean().backward()

    with pytest.raises(PrivacyError, match="no batch of the private loader"):
        optimizer.accumulate(1)
    x, _ = next(batches := iter(loader))
    with pytest.raises(PrivacyError, match=rf"accumulate\({len(x) + 1}\)"):
        optimizer.accumulate(len(x) + 1)
    with pytest.raises(PrivacyError, match=r"accumulate\(0\)"):
        optimizer.accumulate(0)
    backward(x[:2])
    with pytest.raises(PrivacyError, match="3 records but the model took them for 2"):
        optimizer.accumulate(3)
    optimizer.accumulate(2)
    with pytest.raises(PrivacyError, match=f"{len(x) - 2} of the {len(x)} records"):
        optimizer.step()
    backward(x)  # the first two a second time
    with pytest.raises(PrivacyError, match=f"{len(x) - 2} records but the model took them for {len(x)}"):
        optimizer.step()
    optimizer.zero_grad()
    backward(x[2:])
    optimizer.accumulate(len(x) - 2)
    with pytest.raises(PrivacyError, match="each counts once"):
        optimizer.accumulate(1)
    optimizer.step()
    with pytest.raises(PrivacyError, match="in flight"):
        optimizer.accumulate(1)
    batches.close()
    engine.detach()


Pair = namedtuple("Pair", ["left", "right"])


def test_parts_that_share_their_rows_are_refused() -> None:
    """Two records in one row would be clipped as one: either of them could move the sum by up to twice the bound."""
    model, optimizer, loader, engine = parts(Gpu())
    x, _ = next(batches := iter(loader))
    model(x[:2]).sum(1).mean().backward()
    model(x[2:4]).sum(1).mean().backward()
    optimizer.accumulate(2)
    with pytest.raises(PrivacyError, match="no backward came before"):
        optimizer.accumulate(2)
    batches.close()
    engine.detach()


def test_batches_of_any_make_are_cut_by_record() -> None:
    x, mask = torch.arange(12).view(4, 3), torch.ones(4, 3)
    batch = {"x": x, "more": [mask, ("a", "b", "c", "d")], "pair": Pair(x, None), "scale": torch.tensor(2.0), "n": 7}
    part = rows(batch, 1, 2, 4)
    assert torch.equal(part["x"], x[1:3]) and torch.equal(part["more"][0], mask[1:3])
    assert part["more"][1] == ("b", "c") and isinstance(part["pair"], Pair) and part["pair"].right is None
    assert part["scale"] == 2.0 and part["n"] == 7 and batch_size(part) == 2
    with pytest.raises(ConfigurationError, match="max_physical_batch_size"):
        rows({"x": x, "positions": torch.arange(3)}, 0, 2, 4)


def test_what_running_out_of_memory_looks_like() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 57, dtype=torch.uint8)  # no machine has it: the allocator's own words
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("shapes")) and not is_out_of_memory(ValueError("out of memory"))
