"""Poisson sampling from one plan: rates, independence, micro-batches, epochs. Seeds are fixed; rates are stated."""

import itertools
import math

import pytest
import torch

from lsg.errors import ConfigurationError
from lsg.perf import padded_size
from lsg.sampling.plan import SamplingPlan
from lsg.sampling.poisson_batches import LogicalBatches
from lsg.sampling.random_sources import TorchNoise


def batches(plan: SamplingPlan, seed: int = 0, **options: object) -> LogicalBatches:
    return LogicalBatches(plan, TorchNoise(torch.Generator().manual_seed(seed)), **options)  # type: ignore[arg-type]


def draws(plan: SamplingPlan, epochs: int) -> list[list[int]]:
    sampler, found = batches(plan), []
    for epoch in range(epochs):
        found += [[i for micro in logical for i in micro] for logical in sampler.draw_epoch(epoch)]
    return found


def test_every_record_enters_every_step_with_the_plans_rate() -> None:
    """Counts are binomial: a deviation of 5 standard deviations happens once in 1.7 million tests of this kind."""
    plan = SamplingPlan(records=200, batch_size=20)
    steps = draws(plan, epochs=200)
    assert len(steps) == 2000
    sizes = torch.tensor([len(step) for step in steps], dtype=torch.float64)
    q, n = plan.sample_rate, plan.records
    assert abs(float(sizes.mean()) - n * q) < 5 * math.sqrt(n * q * (1 - q) / len(steps))
    # Poisson sampling gives batches of varying size: n q (1 - q), where fixed-size batches would give 0.
    assert float(sizes.var()) == pytest.approx(n * q * (1 - q), rel=5 * math.sqrt(2 / len(steps)))
    counts = torch.zeros(n).index_add(0, torch.tensor([i for s in steps for i in s]), torch.ones(int(sizes.sum())))
    limit = 6 * math.sqrt(len(steps) * q * (1 - q))  # the largest of 200 records: 4e-7
    assert float((counts - len(steps) * q).abs().max()) < limit


def test_records_are_drawn_independently_of_each_other_and_of_other_steps() -> None:
    plan = SamplingPlan(records=2, batch_size=1)
    steps = [set(step) for step in draws(plan, epochs=2000)]
    both = sum(step == {0, 1} for step in steps) / len(steps)
    again = sum(0 in a and 0 in b for a, b in itertools.pairwise(steps)) / (len(steps) - 1)
    limit = 5 * math.sqrt(0.25 * 0.75 / len(steps))
    assert abs(both - 0.25) < limit and abs(again - 0.25) < 2 * limit


def test_no_record_comes_twice_in_a_step() -> None:
    assert all(len(step) == len(set(step)) for step in draws(SamplingPlan(50, 25), epochs=20))


def test_epochs_add_up_where_the_batch_does_not_divide_the_records() -> None:
    plan = SamplingPlan(records=67_349, batch_size=2_000)
    assert plan.steps(20) == 673 and plan.sample_rate == 2_000 / 67_349
    assert sum(plan.first_step(e + 1) - plan.first_step(e) for e in range(20)) == 673


def test_micro_batches_hold_the_same_records_sorted_by_length() -> None:
    plan = SamplingPlan(records=100, batch_size=30)
    lengths = [(7 * i) % 50 for i in range(100)]
    whole, split = batches(plan), batches(plan, max_physical_batch_size=8, lengths=lengths)
    for one, parts in zip(whole.draw_epoch(0), split.draw_epoch(0), strict=True):
        assert all(len(part) <= 8 for part in parts)
        assert sorted(i for part in parts for i in part) == sorted(i for part in one for i in part)
        in_order = [lengths[i] for part in parts for i in part]
        assert in_order == sorted(in_order)


def test_micro_batches_keep_to_a_number_of_tokens() -> None:
    plan = SamplingPlan(records=1000, batch_size=500)
    lengths = [1 + (7 * i) % 50 for i in range(999)] + [400]
    whole, split = batches(plan), batches(plan, max_physical_batch_size=40, lengths=lengths, max_tokens=300)
    for epoch in range(3):
        for one, parts in zip(whole.draw_epoch(epoch), split.draw_epoch(epoch), strict=True):
            assert sorted(i for part in parts for i in part) == sorted(i for part in one for i in part)
            for part in parts:
                longest = max(lengths[i] for i in part)
                assert len(part) <= 40 and (len(part) * longest <= 300 or len(part) == 1)
            assert all(padded_size(len(part), None) == len(part) for part in parts[:-1])
            assert len(parts) < 60  # 300 tokens are 6 of the longest: that size alone would make 85 of them


def test_batches_larger_than_the_data_and_bad_sizes() -> None:
    plan = SamplingPlan(records=5, batch_size=9)
    assert plan.sample_rate == 1.0 and plan.expected_batch_size == 5
    assert draws(plan, 1) == [[0, 1, 2, 3, 4]]
    for bad in (lambda: SamplingPlan(0, 1), lambda: SamplingPlan(5, 0), lambda: batches(plan, lengths=[1, 2])):
        with pytest.raises(ConfigurationError):
            bad()
