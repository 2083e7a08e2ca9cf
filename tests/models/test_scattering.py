"""The scattering transform: kymatio's values, and the properties that make its features worth having."""

import pytest
import torch

from lsg.errors import ConfigurationError
from lsg.models.scattering import FEATURES, Scattering

# kymatio 0.3.0, Scattering2D(J=2, shape=(12, 8)), of the image below: features 0, 3, 11, 20 and 77 at place (1, 0), and
# the mean of each order.
KYMATIO = {
    "places": [0.516852, 0.064713, 0.029901, 0.00377, 0.002893],
    "orders": [0.492318, 0.041977, 0.004734],
}


def image(rows: int, columns: int) -> torch.Tensor:
    y, x = torch.arange(rows).view(-1, 1), torch.arange(columns)
    return ((7 * y * y + 3 * x * y + 5 * x) % 11 / 10.0).view(1, 1, rows, columns)


def test_values_are_kymatios() -> None:
    found = Scattering(12, 8)(image(12, 8))[0]
    places = found[[0, 3, 11, 20, 77], 1, 0]
    orders = torch.stack([part.mean() for part in found.split([1, 16, 64])])
    torch.testing.assert_close(places, torch.tensor(KYMATIO["places"]), rtol=5e-3, atol=1e-5)
    torch.testing.assert_close(orders, torch.tensor(KYMATIO["orders"]), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("size", [(8, 8), (28, 28), (32, 32), (30, 45)])
def test_shapes(size: tuple[int, int]) -> None:
    assert Scattering(*size)(torch.rand(2, 3, *size)).shape == (2, 3 * FEATURES, size[0] // 4, size[1] // 4)


def test_nothing_is_trained_or_saved() -> None:
    transform = Scattering(16, 16)
    assert not list(transform.parameters()) and not transform.state_dict()


def test_an_even_image_has_an_average_and_nothing_else() -> None:
    found = Scattering(16, 16)(torch.full((1, 1, 16, 16), 0.7))[0]
    torch.testing.assert_close(found[0], torch.full((4, 4), 0.7), rtol=1e-3, atol=1e-4)
    assert found[1:].abs().max() < 1e-5


def test_a_turned_image_has_turned_features() -> None:
    """A quarter turn moves angle number 0 to number 4, at both scales."""
    x = torch.sin(torch.arange(32) * 1.3 + torch.arange(32).view(-1, 1) * 0.5).view(1, 1, 32, 32)
    transform = Scattering(32, 32)
    straight, turned = transform(x)[0], transform(x.rot90(1, (2, 3)))[0]
    for start in (1, 9):
        first = straight[start : start + 8].mean((1, 2))
        assert (first - first.roll(4)).abs().max() > 0.3 * first.max()  # stripes have a direction
        # Every fourth pixel is a sample, and those are not where the turn takes them.
        torch.testing.assert_close(turned[start : start + 8].mean((1, 2)), first.roll(4), rtol=0.1, atol=0)


def test_it_computes_in_float32_under_autocast() -> None:
    x, transform = torch.rand(2, 1, 8, 8), Scattering(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(transform(x), transform.float()(x))
        assert transform(x).dtype == torch.float32


def test_too_small_images_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="images of 7 x 32: scattering needs 8 x 8 pixels or more"):
        Scattering(7, 32)
