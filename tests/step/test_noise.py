"""Noise and samples are what they should be, from both sources; and noise lies on a grid.

Each statistical check gives the probability that a perfect source does as badly, and fails below ALARM. A seed fixes
what the plain source draws, so a test that passes always passes. The secure source is new each time: fewer than 100
checks use it, so that a run of this file raises a false alarm with a probability below 1e-6.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import LSG, PrivacyEngine
from lsg.sampling.plan import SamplingPlan
from lsg.sampling.poisson_batches import LogicalBatches
from lsg.sampling.random_sources import NoiseSource, TorchNoise, fresh_generator
from lsg.sampling.secure_source import SecureNoise, box_muller
from lsg.step.clipping import ClippedSum
from lsg.step.noise import add_noise, grid_of

ALARM = 1e-8
CPU = torch.device("cpu")


def plain() -> NoiseSource:
    return TorchNoise(fresh_generator(CPU, b"7"))


SOURCES: dict[str, Callable[[], NoiseSource]] = {"plain": plain, "secure": SecureNoise}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> NoiseSource:
    return SOURCES[request.param]()


# --- checks: numbers in, probability of the like by chance out -------------------------------------------------------


def normality(x: np.ndarray) -> float:
    """Kolmogorov-Smirnov, and the chi-square law of the sum of squares, which is sharper on the variance."""
    spread = stats.chi2(len(x)).cdf(float((x**2).sum()))
    return min(float(stats.kstest(x, "norm").pvalue), 2 * min(spread, 1 - spread))


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Of independent standard normal numbers: the sum of products is normal for many of them."""
    return float(2 * stats.norm.sf(abs((x * y).sum()) / math.sqrt(len(x))))


def autocorrelation(x: np.ndarray) -> list[float]:
    return [correlation(x[lag:], x[:-lag]) for lag in range(1, 21)]


def evenness(values: np.ndarray, cells: int) -> float:
    """Chi-square of whole numbers below `cells`, all equally likely."""
    return float(stats.chisquare(np.bincount(values, minlength=cells)).pvalue)


# --- the sources by themselves ---------------------------------------------------------------------------------------


def test_numbers_are_standard_normal_and_independent(source: NoiseSource) -> None:
    x = source.normal(400_000, CPU, torch.float32).double().numpy()
    assert normality(x) > ALARM
    assert min(autocorrelation(x)) > ALARM
    assert correlation(x[:200_000], x[200_000:]) > ALARM  # the two that one radius gives, in the secure source
    assert correlation(x[:200_000] ** 2 - 1, (x[200_000:] ** 2 - 1) / 2) > ALARM


def test_draws_are_independent_of_each_other(source: NoiseSource) -> None:
    draws = [source.normal(100_000, CPU, torch.float32).double().numpy() for _ in range(4)]
    assert min(correlation(one, other) for i, one in enumerate(draws) for other in draws[:i]) > ALARM


BAD: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "too little noise": lambda x: 0.99 * x,
    "shifted": lambda x: x + 0.02,
    "cut off": lambda x: np.clip(x, -2.5, 2.5),
    "uniform": lambda x: np.tanh(x) * 1.6,
    "repeats": lambda x: np.tile(x[:10], len(x) // 10),
    "remembers": lambda x: (x + 0.02 * np.roll(x, 3)) / math.hypot(1, 0.02),
}


def test_streams_are_not_those_that_can_be_tried_one_by_one() -> None:
    """torch's generator on a CPU takes 32 bits of a seed."""
    few = [torch.Generator().manual_seed(7 + (high << 32)) for high in (0, 1)]
    assert torch.equal(*(torch.rand(4, generator=generator) for generator in few))
    for generator in (fresh_generator(CPU), fresh_generator(CPU, b"secret")):
        named = torch.Generator().manual_seed(generator.initial_seed())
        assert not torch.equal(*(torch.rand(4, generator=g, dtype=torch.float64) for g in (generator, named)))
    again, other = (fresh_generator(CPU, secret) for secret in (b"secret", b"secret!"))
    drawn = torch.rand(4, generator=fresh_generator(CPU, b"secret"))
    assert torch.equal(torch.rand(4, generator=again), drawn)
    assert not torch.equal(torch.rand(4, generator=other), drawn)


@pytest.mark.parametrize("flaw", BAD)
def test_the_checks_notice_a_flaw(flaw: str) -> None:
    x = BAD[flaw](np.random.default_rng(0).standard_normal(400_000))
    assert min([normality(x), *autocorrelation(x)]) < ALARM


def test_uniform_numbers_are_even_in_high_and_low_bits(source: NoiseSource) -> None:
    numbers = (source.uniform(400_000) * 2**53).long().numpy()
    assert numbers.min() >= 0 and numbers.max() < 2**53
    assert evenness(numbers >> 45, 256) > ALARM and evenness(numbers & 255, 256) > ALARM
    assert evenness(((numbers[1:] >> 49) << 4) | (numbers[:-1] >> 49), 256) > ALARM


def test_permutations_are_even(source: NoiseSource) -> None:
    orders = [tuple(source.permutation(4).tolist()) for _ in range(2_400)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    names = {order: number for number, order in enumerate(sorted(set(orders)))}
    assert len(names) == 24
    assert evenness(np.array([names[order] for order in orders]), 24) > ALARM


def test_poisson_samples_have_the_rate_for_each_record_and_are_independent(source: NoiseSource) -> None:
    sampler = LogicalBatches(SamplingPlan(records=100, batch_size=20), source)
    drawn = np.zeros((2_000, 100))
    for epoch in range(400):
        for number, logical in enumerate(sampler.draw_epoch(epoch)):
            drawn[5 * epoch + number, [record for micro in logical for record in micro]] = 1
    variance = 2_000 * 0.2 * 0.8
    by_record = ((drawn.sum(0) - 400) ** 2).sum() / variance
    assert min(stats.chi2(100).cdf(by_record), stats.chi2(100).sf(by_record)) > ALARM
    standard = (drawn - 0.2) / 0.4
    assert correlation(standard[1:].ravel(), standard[:-1].ravel()) > ALARM  # from step to step
    assert correlation(standard[:, 1:].ravel(), standard[:, :-1].ravel()) > ALARM  # from record to record


# --- after the whole pipeline ----------------------------------------------------------------------------------------


@pytest.fixture
def noisy_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The noise of every step, in standard deviations, as it is released."""
    captured: list[Tensor] = []

    def spy(clipped: ClippedSum, *args: Any) -> Any:
        assert not clipped.vector.any()
        noisy = add_noise(clipped, *args)
        captured.append(noisy.vector.double() / noisy.standard_deviation)
        return noisy

    monkeypatch.setattr("lsg.step.gradients.add_noise", spy)
    yield captured


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_released_noise_is_normal_and_independent_across_steps_and_layers(
    secure: bool, noisy_sums: list[Tensor]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 90), nn.Linear(90, 90), nn.Linear(90, 60))
    engine = PrivacyEngine(accountant="rdp", secure_mode=secure)
    _, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 60)), batch_size=4),
        noise_multiplier=1.3,
        max_grad_norm=0.7,
        method=LSG(rank=4, sparsity=0.5),
        noise_generator=None if secure else torch.Generator().manual_seed(3),
    )
    for _ in range(200):
        (model(torch.zeros(3, 60)) * 0).sum().backward()
        optimizer.step()
    steps = torch.stack(noisy_sums).numpy()  # (steps, numbers)
    assert normality(steps.ravel()) > ALARM
    assert min(autocorrelation(steps.ravel())) > ALARM  # within a step
    assert min(autocorrelation(steps.T.ravel())) > ALARM  # of one number, from step to step
    recorder = engine._recorder
    assert recorder is not None
    sizes = [slot.dimensions for slot in recorder.in_order]
    layers = [part for part in np.split(steps, np.cumsum(sizes)[:-1], axis=1) if part.shape[1] >= 100]
    assert len(layers) == 3
    for i, one in enumerate(layers):
        for other in layers[:i]:
            width = min(one.shape[1], other.shape[1])
            assert correlation(one[:, :width].ravel(), other[:, :width].ravel()) > ALARM


# --- the grid --------------------------------------------------------------------------------------------------------


class Given:
    """A source that draws given numbers."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def normal(self, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        assert count == len(self.numbers)
        return self.numbers


def noisy(vector: Tensor, source: Any, *, sigma: float = 1.1, bound: float = 0.7) -> Tensor:
    return add_noise(ClippedSum(vector, bound), sigma, source).vector


def random_sum(size: int = 10_000, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_output_is_a_whole_number_of_grid_steps(source: NoiseSource) -> None:
    grid = grid_of(1.1 * 0.7)
    for scale in (1, 1e-9, 1e6):
        vector = random_sum() * scale
        steps = noisy(vector, source) / grid
        assert torch.equal(steps, steps.round())
        assert torch.equal(vector, random_sum() * scale)  # the sum itself is left alone


def test_noise_and_sum_meet_without_rounding() -> None:
    """What two sums differ by is the same under any noise: it tells no more than exact noise on the rounded sums."""
    grid = grid_of(1.1 * 0.7)
    one, other = random_sum(), random_sum(seed=1) * 3
    rounded = (one / grid).round() * grid - (other / grid).round() * grid
    for seed in range(5):
        numbers = Given(random_sum(seed=10 + seed) * 4)
        assert torch.equal(noisy(one, numbers) - noisy(other, numbers), rounded)


def test_plain_floating_point_noise_would_tell_a_zero_from_a_one() -> None:
    """The attack of Haney et al.: bits finer than a number near 1 can have are seen only if the sum was 0."""
    noise = random_sum().abs() * 0.01
    fine = 2.0**-52

    def share_of_fine_bits(values: Tensor) -> float:
        return float(((values / fine) != (values / fine).round()).double().mean())

    zero, one = torch.zeros(10_000, dtype=torch.float64), torch.ones(10_000, dtype=torch.float64)
    assert share_of_fine_bits(zero + noise) > 0.9 and share_of_fine_bits(one + noise) == 0
    assert share_of_fine_bits(noisy(zero, Given(noise))) == share_of_fine_bits(noisy(one, Given(noise))) == 0


@pytest.mark.parametrize("sigma", [1e-3, 0.5, 1.0, 1.7, 64.0])
@pytest.mark.parametrize("bound", [1e-6, 0.3, 1.0, 1e4])
def test_the_noise_covers_what_rounding_does_to_the_sensitivity(sigma: float, bound: float) -> None:
    size = 5_000
    grid = grid_of(sigma * bound)
    assert math.frexp(grid)[0] == 0.5 and 2**-23 < grid / (sigma * bound) <= 2**-22
    found = add_noise(ClippedSum(random_sum(size), bound), sigma, plain())
    assert found.standard_deviation == sigma * (bound + grid * math.sqrt(size))
    # The worst pair of neighbours: each entry just beyond the middle between two grid points, on either side.
    one = torch.full((size,), 0.5 + 1e-6, dtype=torch.float64) * grid
    other = torch.full((size,), 0.5 - 1e-6, dtype=torch.float64) * grid
    still = Given(torch.zeros(size, dtype=torch.float64))
    moved = noisy(one, still, sigma=sigma, bound=bound) - noisy(other, still, sigma=sigma, bound=bound)
    assert float(moved.norm()) == pytest.approx(grid * math.sqrt(size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_is_float32_or_better_and_no_noise_changes_nothing(dtype: torch.dtype) -> None:
    vector = random_sum(50).to(dtype)
    assert noisy(vector, plain()).dtype == torch.promote_types(dtype, torch.float32)
    untouched = add_noise(ClippedSum(vector, 1.0), 0.0, plain())
    assert torch.equal(untouched.vector, vector.to(untouched.vector.dtype)) and untouched.standard_deviation == 0


def test_low_bits_of_the_grid_steps_are_even() -> None:
    """They carry nothing of the sum."""
    grid = grid_of(1.1 * 0.7)
    for value in (0.0, 1 / 3):
        steps = noisy(torch.full((400_000,), value, dtype=torch.float64), SecureNoise()) / grid
        assert evenness(steps.long().numpy() & 1023, 1024) > ALARM


# --- how exact the secure source is ----------------------------------------------------------------------------------


def test_numbers_are_as_exact_as_the_argument_needs() -> None:
    """Against 50 digits: within radius * 2^-50 (and 2^-54 / radius) of what the random bits stand for."""
    mpmath.mp.dps = 50
    words = torch.randint(-(2**63), 2**63 - 1, (3, 500), generator=torch.Generator().manual_seed(0))
    words[0, :50] >>= 40  # far out
    words[0, :50] &= 2**24 - 1
    words[0, 50:60] = -1 ^ (1 << 30)  # near the middle
    found = box_muller(words.flatten())
    for i, (high, low, turn) in enumerate((words.T >> 11 & 2**53 - 1).tolist()):
        uniform = (high + (low + mpmath.mpf(1) / 2) / 2**53) / mpmath.mpf(2) ** 53
        radius, angle = mpmath.sqrt(-2 * mpmath.log(uniform)), 2 * mpmath.pi * turn / mpmath.mpf(2) ** 53
        limit = radius * mpmath.mpf(2) ** -50 + mpmath.mpf(2) ** -54 / radius
        assert abs(mpmath.mpf(float(found[i])) - radius * mpmath.cos(angle)) < limit
        assert abs(mpmath.mpf(float(found[i + 500])) - radius * mpmath.sin(angle)) < limit


def test_extreme_bits_give_finite_numbers() -> None:
    assert float(box_muller(torch.zeros(3, dtype=torch.int64))[0]) == pytest.approx(math.sqrt(2 * 107 * math.log(2)))
    assert box_muller(torch.full((3,), -1)).abs().max() < 1e-7


def test_any_count_can_be_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lsg.sampling.secure_source._BLOCK", 6)
    source = SecureNoise()
    for count in (0, 1, 5, 6, 7, 12, 13):
        numbers = source.normal(count, CPU, torch.float32)
        assert numbers.shape == (count,) and numbers.dtype == torch.float64 and len(numbers.unique()) == count
