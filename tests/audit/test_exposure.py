"""Exposure: chance where nothing was learnt, all bits where a secret comes first."""

import math

import pytest
import torch

from lsg.audit.exposure import BY_CHANCE, exposures, random_secrets, standard_error


def test_secrets_are_different_and_repeat_with_the_seed() -> None:
    found = random_secrets(1000, seed=3)
    assert len(set(found)) == 1000
    assert found == random_secrets(1000, seed=3) != random_secrets(1000, seed=4)


def test_a_memorised_secret_has_all_bits_and_a_forgotten_one_none() -> None:
    references = torch.arange(1023.0)
    found = exposures(torch.tensor([2000.0, 1022.0, -1.0]), references)
    assert found.tolist() == pytest.approx([10.0, 9.0, 0.0])


def test_a_model_that_tells_all_texts_alike_exposes_nothing() -> None:
    assert exposures(torch.zeros(5), torch.zeros(100)).tolist() == pytest.approx([0.0] * 5)


def test_a_model_that_says_nothing_finite_exposes_nothing() -> None:
    nan = math.nan
    assert exposures(torch.tensor([nan, nan]), torch.tensor([nan] * 100)).tolist() == pytest.approx([0.0] * 2)
    assert exposures(torch.tensor([nan]), torch.arange(100.0)).tolist() == pytest.approx([0.0])


def test_chance_is_what_a_model_without_memory_shows() -> None:
    generator = torch.Generator().manual_seed(0)
    found = exposures(torch.randn(4000, generator=generator), torch.randn(5000, generator=generator))
    assert abs(found.mean().item() - BY_CHANCE) < 4 * standard_error(4000) + 0.05
    assert found.std().item() == pytest.approx(BY_CHANCE, rel=0.1)
    assert math.isclose(standard_error(100), BY_CHANCE / 10)
