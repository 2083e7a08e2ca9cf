"""Settings that nobody gave: from a recipe for the data at hand, or from the paper."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lsg.errors import ConfigurationError
from lsg.train.choose import choose_settings
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.run import run
from tests.support.tiny import glue_sst2, tiny_bert
from tests.support.train_runs import DIGITS


class Notes(Listener):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_the_recipe_is_chosen_for_the_records_and_told_with_its_reasons(tmp_path: Path) -> None:
    given = {"task": "text", "data": str(glue_sst2(tmp_path / "data")), "model": str(tiny_bert(tmp_path / "bert"))}
    listener = Notes()
    config = choose_settings({**given, "epsilon": 3.0, "max_length": 32, "device": "cpu"}, "options", listener)
    assert (config.recipe, config.trainable, config.pooling) == ("auto", "head", "mean")
    assert config.max_physical_tokens == 2048
    assert config.batch_size == 96 and config.clipping == "automatic" and config.delta == 1e-3
    (told,) = listener.notes
    assert told.startswith("recipe for 96 records at ε = 3") and "why: " in told


def test_what_was_given_is_kept(tmp_path: Path) -> None:
    listener = Notes()
    given = {"task": "digits", "epsilon": 3.0, "lr": 0.5, "batch_size": 100, "model": "small-cnn"}
    config = choose_settings(given, "options", listener)
    assert (config.lr, config.batch_size, config.model) == (0.5, 100, "small-cnn")
    assert listener.notes[0].endswith("given, and kept: batch_size, lr, model")
    assert "about 100 records" in listener.notes[0] and "rate 0.5" in listener.notes[0]  # what will run


def test_the_papers_recipe_and_non_private_training_take_the_preset() -> None:
    paper = choose_settings({"task": "digits", "epsilon": 3.0, "recipe": "paper"}, "options", Listener())
    assert (paper.method, paper.batch_size, paper.recipe) == ("lsg", 512, "paper")
    plain = choose_settings({"task": "digits", "method": "non-private"}, "options", Listener())
    assert (plain.method, plain.batch_size) == ("non-private", 512)


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 2048), ("cuda", 16384), ("mps", 8192)])
@pytest.mark.parametrize("given", [{"recipe": "paper", "epsilon": 3.0}, {"method": "non-private"}], ids=str)
def test_every_recipe_computes_as_many_tokens_at_once_as_suit_the_device(
    given: dict[str, Any], device: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lsg.train.precision.choose_device", lambda name: torch.device(device))
    chosen = choose_settings({"task": "sst2", **given}, "options", Listener())
    assert chosen.max_physical_tokens == tokens
    kept = choose_settings({"task": "sst2", **given, "max_physical_tokens": 100}, "options", Listener())
    assert kept.max_physical_tokens == 100


@pytest.mark.parametrize(
    ("device", "given", "images"),
    [
        ("cpu", {}, 128),
        ("cuda", {}, 520),
        ("cpu", {"model": "small-cnn"}, 520),
        ("cpu", {"max_physical_batch_size": 64}, 64),
        ("cpu", {"views": 200}, 520),
    ],
)
def test_few_whole_images_are_computed_at_once_on_a_cpu(
    device: str, given: dict[str, Any], images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lsg.train.precision.choose_device", lambda name: torch.device(device))
    chosen = choose_settings({"task": "cifar10", "recipe": "paper", "epsilon": 3.0, **given}, "options", Listener())
    assert chosen.max_physical_batch_size == images


def test_how_it_is_computed_is_left_to_the_engine() -> None:
    config = choose_settings({"task": "digits", "epsilon": 3.0, "recipe": "paper"}, "options", Listener())
    assert config.compile is None and config.cuda_graphs is None
    older = RunConfig.from_dict({**config.to_dict(), "compile": False, "cuda_graphs": True}, "config.toml")
    assert older.compile is False and older.cuda_graphs is True


def test_another_recipe_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--recipe 'grandma' must be one of auto, paper"):
        choose_settings({"task": "digits", "epsilon": 3.0, "recipe": "grandma"}, "options", Listener())


def test_the_statement_tells_that_the_choice_follows_from_the_number_of_records(tmp_path: Path) -> None:
    for recipe in ("auto", "paper"):
        result = run(replace(DIGITS, recipe=recipe, epochs=1), tmp_path / recipe)
        assert ("what --recipe auto chose" in result.privacy["public_by_assumption"][0]) == (recipe == "auto")
