"""Units in whole runs: memory that runs out, and what is refused by name."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lsg import DPSGD, LSG, ConfigurationError, NonPrivate, PrivacyError
from lsg.errors import OutOfMemory
from lsg.step.out_of_memory import BackwardInPieces
from tests.step.test_units import IDS, loss, network, private, records, views_of


class Gpu(nn.Module):
    """Runs out of memory for more rows than fit."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.body, self.fits = network(), fits

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        out: Tensor = self.body(x)
        return out


def flat_views(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch[0], batch[1])


def views_in_the_loss(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, views_of(batch[0], 2), batch[1].repeat_interleave(2))


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("compute", [flat_views, views_in_the_loss])
@pytest.mark.parametrize("options", [{"views": 2}, {"views": 2, "unit_of": IDS}])
def test_a_batch_that_does_not_fit_is_cut_between_units(
    options: dict[str, Any], compute: Callable[[nn.Module, Any], Tensor]
) -> None:
    ends = []
    for fits in (10**6, 7):
        model = Gpu(fits)
        _, optimizer, loader = private(model, LSG(rank=2), noise_multiplier=1.0, **options)
        backward = BackwardInPieces(model, optimizer, compute)
        for x, y, _ in loader:
            flat = compute is flat_views
            backward((views_of(x, 2), y.repeat_interleave(2)) if flat else (x, y))
            optimizer.step()
        assert (backward.largest is None) == (fits > 7)
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.allclose(*ends, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:memory ran out")
def test_a_unit_that_does_not_fit_is_not_cut() -> None:
    model = Gpu(2)
    _, optimizer, loader = private(model, DPSGD(), unit_of=IDS, batch_size=13)
    backward = BackwardInPieces(model, optimizer, flat_views)
    with pytest.raises(OutOfMemory, match=r"not even one unit of 3 records .* max_records_per_unit"):
        for x, y, _ in loader:
            backward((x, y))


def test_a_part_that_ends_inside_of_a_unit_is_refused() -> None:
    model = network()
    _, optimizer, loader = private(model, DPSGD(), unit_of=IDS, batch_size=13)
    batches = iter(loader)
    x, y, _ = next(batches)
    loss(model, x[:2], y[:2]).backward()
    with pytest.raises(PrivacyError, match="2 rows of the batch ends inside of a unit"):
        optimizer.accumulate(2)  # the first unit has one record, the second has two


def test_rows_that_are_not_all_views_are_refused() -> None:
    model = network()
    _, optimizer, loader = private(model, DPSGD(), views=3)
    batches = iter(loader)
    x, y, _ = next(batches)
    loss(model, x, y).backward()  # the loop forgot to make views
    with pytest.raises(PrivacyError, match=rf"{len(x)} records, which with views=3 are {3 * len(x)} rows"):
        optimizer.step()
    model = network()
    _, optimizer, _ = private(model, DPSGD(), views=3)
    loss(model, *records()[:7][:2]).backward()
    with pytest.raises(PrivacyError, match=r"a batch of 7 rows.*multiple of 3"):
        optimizer.step()


def test_a_batch_that_lost_a_record_on_the_way_is_refused() -> None:
    """A collate function that drops one would move all records after it into other units."""
    model = network()
    _, optimizer, loader = private(model, DPSGD(), unit_of=IDS, views=2, batch_size=13)
    for x, y, _ in loader:
        loss(model, views_of(x[1:], 2), y[1:].repeat_interleave(2)).backward()
        with pytest.raises(PrivacyError, match=r"24 records, which with views=2 are 48 rows, but .* 46 samples"):
            optimizer.step()
        break


def test_batches_from_elsewhere_have_views_but_no_ids() -> None:
    model = network()
    _, optimizer, _ = private(model, DPSGD(), views=3, loss_reduction="sum", max_grad_norm=1e-3)
    loss(model, *records()[:6][:2], "sum").backward()
    optimizer.gradients.collect(None)
    assert 1e-3 < float(optimizer.gradients.sum.vector.norm()) <= 2e-3  # two units
    model = network()
    engine, optimizer, _ = private(model, DPSGD(), unit_of=IDS)
    loss(model, *records()[:6][:2]).backward()
    with pytest.raises(PrivacyError, match="with unit_of there can be no step"):
        optimizer.step()
    assert len(engine.accountant) == 0


class Nameless:
    """An object that is equal to itself alone."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"views": 0}, "views=0 must be a whole number"),
        ({"views": 1.5}, r"views=1\.5 must be a whole number"),
        ({"views": True}, "views=True must be a whole number"),
        ({"views": None}, "views=None must be a whole number"),
        ({"views": 4, "max_physical_batch_size": 3}, "with views=4 one record has more"),
        ({"unit_of": IDS[:-1]}, "24 records, but unit_of has 23 ids"),
        ({"unit_of": 3}, "unit_of is a int"),
        ({"unit_of": [*IDS[:-1], None]}, "record 23 has the id None"),
        ({"unit_of": torch.tensor([*IDS[:-1], math.nan])}, "record 23 has the id nan"),
        ({"unit_of": torch.zeros(24, 2)}, "record 0 is a list"),
        ({"unit_of": [Nameless() for _ in IDS]}, "record 0 is a Nameless, which cannot be compared by value"),
        (
            {"unit_of": IDS, "max_physical_batch_size": 2},
            "3 rows, and max_physical_batch_size=2.*max_records_per_unit=2",
        ),
        ({"unit_of": IDS, "max_records_per_unit": 0}, "max_records_per_unit=0 must be a whole number"),
        ({"max_records_per_unit": 2}, "needs unit_of"),
        ({"unit_of": IDS, "method": NonPrivate()}, "unit_of: NonPrivate"),
    ],
)
def test_what_does_not_fit_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        private(network(), **{"method": DPSGD()} | options)


def test_a_batch_of_more_than_all_units_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="batch_size=6 counts units with unit_of, and there are 4"):
        assert private(network(), DPSGD(), unit_of=[i % 4 for i in range(len(IDS))])[2].sample_rate == 1.0


def test_ids_are_compared_by_value_whatever_holds_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ids in ([torch.tensor(i) for i in IDS], list(torch.tensor(IDS).numpy()), tuple(IDS)):
            assert private(network(), DPSGD(), unit_of=ids)[2].sample_rate == pytest.approx(6 / 13)
