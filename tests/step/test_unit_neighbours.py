"""Neighbouring data sets, which differ by one unit, change the clipped sum by at most C: from the loader to the sum."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lsg import DPSGD
from lsg.methods import Method
from lsg.sampling.random_sources import TorchNoise
from lsg.step.gradients import PrivateGradients
from tests.step.test_units import CLIPPINGS, IDS, METHODS, loss, network, private, records, run, views_of

C = 0.8
BROKEN = (7, 5)  # units with a record that is not finite
KINDS: dict[str, dict[str, Any]] = {
    "views": {"views": 3},
    "persons": {"unit_of": IDS},
    "views of persons": {"unit_of": IDS, "views": 2},
    "two records a person": {"unit_of": IDS, "max_records_per_unit": 2},
    "views of two records a person": {"unit_of": IDS, "views": 2, "max_records_per_unit": 2},
}


class EverybodyIsDrawn(TorchNoise):
    """All units enter the step, each with its last records where not all may: as if the coins had fallen so in both of
    two neighbouring data sets."""

    def uniform(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64)

    def permutation(self, count: int) -> Tensor:
        return torch.arange(count).flip(0)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The clipped sum of each step that is released."""
    found: list[Tensor] = []
    release = PrivateGradients.release

    def noted(self: PrivateGradients, noise_multiplier: float) -> None:
        if self.sum is not None:
            found.append(self.sum.vector)
        release(self, noise_multiplier)

    monkeypatch.setattr(PrivateGradients, "release", noted)
    return found


def hostile() -> tuple[Tensor, Tensor, Tensor]:
    """Records from tiny to huge that pull the same way, within a unit too; of two units one record is not finite."""
    x, y, number = records().tensors
    x = x[:1] * torch.logspace(-3, 6, len(x), dtype=x.dtype)[:, None]
    x[IDS.index(BROKEN[0]) + 1, 0], x[IDS.index(BROKEN[1]), 2] = math.nan, math.inf
    return x, y[:1].expand_as(y), number


def sum_without(gone: int | None, method: Method, options: dict[str, Any], sums: list[Tensor], rows: int = 7) -> Tensor:
    """Of one step of everybody but one unit, in several micro-batches of at most so many rows."""
    x, y, number = hostile()
    units = options.get("unit_of") or list(range(len(x)))
    kept = [record for record, unit in enumerate(units) if unit != gone]
    own = options | ({"unit_of": [units[record] for record in kept]} if "unit_of" in options else {})
    model = network()
    engine, optimizer, loader = private(
        model,
        method,
        data=TensorDataset(x[kept], y[kept], number[kept]),
        batch_size=len({units[record] for record in kept}),
        max_grad_norm=C,
        max_physical_batch_size=rows,
        **own,
    )
    loader.logical.source = EverybodyIsDrawn(torch.Generator().manual_seed(0))
    assert len(run(model, optimizer, loader, options.get("views", 1))) > 2
    engine.detach()
    return sums.pop()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_one_unit_changes_the_sum_of_a_step_by_at_most_the_bound(
    method: Method, clipping: str, kind: str, sums: list[Tensor]
) -> None:
    """Every unit gone moves the others across the boundaries of micro-batches, and none of them may notice."""
    options = KINDS[kind] | {"clipping": clipping}
    whole = sum_without(None, method, options, sums)
    assert whole.isfinite().all()
    by_id = "unit_of" in options
    # The first and the last, of one record and of three.
    gone = [0, 2, 12] if by_id else [0, 8, 23]
    changes = [float((whole - sum_without(unit, method, options, sums)).norm()) for unit in gone]
    assert max(changes) <= C * (1 + 1e-6)
    assert max(changes) >= C / 2  # the bound is not met by making gradients vanish
    unheard = BROKEN if by_id and "max_records_per_unit" not in options else ()
    for unit in unheard if by_id else (IDS.index(BROKEN[1]),):
        assert torch.allclose(sum_without(unit, method, options, sums), whole, rtol=1e-9, atol=1e-12)


def test_a_whole_unit_counts_once_however_many_rows_it_has(sums: list[Tensor]) -> None:
    """Twenty records that all pull the same way move the sum as far as one does."""
    x, y, _ = hostile()
    lengths = []
    for count in (1, 20):
        data = TensorDataset(x[20:21].repeat(count, 1), y[:1].repeat(count), torch.arange(count))
        model = network()
        _, optimizer, loader = private(model, DPSGD(), data=data, batch_size=1, unit_of=["somebody"] * count, views=2)
        for inputs, labels, _ in loader:
            loss(model, views_of(inputs, 2), labels.repeat_interleave(2)).backward()
            optimizer.step()
        lengths.append(float(sums.pop().norm()))
    assert lengths == pytest.approx([1.0, 1.0])


def test_a_unit_enters_one_step_of_an_epoch_without_poisson_sampling() -> None:
    """Whole, and accounted at rate 1: one mechanism an epoch."""
    model = network()
    engine, optimizer, loader = private(
        model, DPSGD(), unit_of=IDS, views=2, batch_size=4, noise_multiplier=1.0, poisson_sampling=False
    )
    for epoch in range(3):
        seen = run(model, optimizer, loader, views=2)
        assert len(seen) == 4  # 13 units in steps of 4
        assert sorted(record for batch in seen for record in batch) == list(range(len(IDS)))
        units = [{IDS[record] for record in batch} for batch in seen]
        assert [len(step) for step in units] == [4, 4, 4, 1] and len(set().union(*units)) == 13
        assert engine.accountant.history == [(1.0, 1.0, epoch + 1)]
    _, optimizer, loader = private(network(), DPSGD(), unit_of=IDS, poisson_sampling=False, max_records_per_unit=1)
    assert optimizer.expected_batch_size == 6
    assert sum(len(micro) for logical in loader.logical.draw_epoch(0) for micro in logical) == 13
