"""A GAN as in Opacus's example: a private discriminator sees a batch's images and a generator's, one step for both."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, PrivacyError
from lsg.integrations.opacus import PrivacyEngine
from tests.support.reference import batch_of_one_gradients

Z, IMAGES, BATCH = 6, 24, 6
TWO_FORWARDS = "ignore:the model had two forwards with different inputs"


def discriminator() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 8, 4, 2, 1, bias=False), nn.GroupNorm(4, 8), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 1, 2, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip


def generator() -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(Z, 8, 4, 1, 0, bias=False), nn.GroupNorm(4, 8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def setting(*, batch_size: int = BATCH, **options: Any) -> tuple[PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    model, engine = discriminator(), PrivacyEngine(accountant="rdp")
    given: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    images = TensorDataset(torch.randn(IMAGES, 1, 8, 8))
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-4),
        data_loader=DataLoader(images, batch_size=batch_size),
        noise_generator=torch.Generator().manual_seed(3),
        **given,
    )


def judged(model: nn.Module, images: Tensor, label: float) -> Tensor:
    return F.binary_cross_entropy(model(images), images.new_full((len(images),), label))


def both(model: nn.Module, real: Tensor, fake: Tensor) -> None:
    (judged(model, real, 1.0) + judged(model, fake, 0.0)).backward()


def one_after_the_other(model: nn.Module, real: Tensor, fake: Tensor) -> None:
    judged(model, real, 1.0).backward()
    judged(model, fake, 0.0).backward()


@pytest.mark.filterwarnings(TWO_FORWARDS)
@pytest.mark.parametrize("backward", [both, one_after_the_other])
def test_a_record_has_its_own_gradient_and_that_of_one_made_up_image(backward: Callable[..., None]) -> None:
    engine, model, optimizer, loader = setting(method=DPSGD())
    for (real,) in loader:
        fake = torch.randn_like(real)
        backward(model, real, fake)
        got = engine.per_sample_gradients()
        wanted = batch_of_one_gradients(
            model, (real, fake), len(real), lambda m, pair: judged(m, pair[0], 1.0) + judged(m, pair[1], 0.0)
        )
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings(TWO_FORWARDS)
def test_images_that_are_made_up_are_as_many_as_the_records() -> None:
    """Twice as many rows are taken for twice as many records, and refused, however they come."""
    for more in ("together", "two backwards", "one backward"):
        _, model, optimizer, loader = setting()
        with pytest.raises(PrivacyError, match=r"first dimension|samples wait|another number of samples"):
            for (real,) in loader:
                fake = torch.randn(len(real) + 1, 1, 8, 8)
                if more == "together":
                    judged(model, torch.cat([real, fake]), 1.0).backward()
                elif more == "two backwards":
                    one_after_the_other(model, real, fake)
                else:
                    both(model, real, fake)
                optimizer.step()
                optimizer.zero_grad()


def opacus_example(step: str) -> list[str]:
    """Its loop; the generator's step at the end of each batch, on as many images (as there), or once a logical step on
    a number that is fixed. Returns what was warned of."""
    engine, model, optimizer, loader = setting()
    maker = generator()
    other = torch.optim.Adam(maker.parameters(), lr=2e-4)

    def train_generator(images: int) -> None:
        other.zero_grad()
        judged(model, maker(torch.randn(images, Z, 1, 1)), 1.0).backward()
        other.step()
        optimizer.zero_grad()

    if step == "logical":
        optimizer.on_logical_step(lambda: train_generator(optimizer.expected_batch_size))
    before = maker[0].weight.detach().clone()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            for (real,) in loader:
                optimizer.zero_grad(set_to_none=True)
                fake = maker(torch.randn(len(real), Z, 1, 1))
                both(model, real, fake.detach())
                optimizer.step()
                if step == "batch":
                    train_generator(len(real))
    assert len(engine.accountant) == loader.steps(2) and not torch.equal(maker[0].weight, before)
    return [str(warning.message) for warning in seen]


def test_opacus_example_runs_and_is_told_what_gives_the_number_of_records_away() -> None:
    first, second = opacus_example("batch")
    assert "inputs made without records (a GAN's images)" in first
    assert "on_logical_step" in second and "expected_batch_size" in second


def test_a_generator_that_makes_a_fixed_number_once_a_logical_step_is_right() -> None:
    assert len(opacus_example("logical")) == 1


@pytest.mark.filterwarnings(TWO_FORWARDS)
def test_the_generator_has_a_step_for_batches_that_nobody_sees() -> None:
    """With one record a batch every third draw or so is empty, and the loop has no turn for it."""
    _, model, optimizer, loader = setting(batch_size=1)
    turns, steps = 0, []
    optimizer.on_logical_step(lambda: steps.append(len(steps)))
    for (real,) in loader:
        judged(model, real, 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        turns += 1
    assert turns < len(steps) == loader.steps(1) == IMAGES
