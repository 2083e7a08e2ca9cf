"""`lsg.recommend`: what it chooses, what it says, what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lsg
from lsg.methods import DPSGD, RGP
from lsg.tasks.language_models import with_adapters
from lsg.train.config import RunConfig
from tests.support.language import tiny_llama


def test_little_data_or_a_small_epsilon_train_a_head_alone() -> None:
    few = lsg.recommend(records=2000, epsilon=3.0, task="text")
    assert (few.trainable, few.pooling, few.batch_size, few.method) == ("head", "mean", 2000, DPSGD())
    assert lsg.recommend(records=19_000, epsilon=0.5, task="text").trainable == "head"


def test_enough_data_fine_tune_in_low_rank() -> None:
    many = lsg.recommend(records=10_000, epsilon=3.0, task="text")
    assert (many.trainable, many.method, many.batch_size) == ("paper", RGP(rank=8), 1000)
    most = lsg.recommend(records=67_349, epsilon=3.0, task="text")
    assert (most.pooling, most.batch_size, most.method) == ("mean", 2600, RGP(rank=16))


@pytest.mark.parametrize("task", ["text", "tokens", "image", "generate"])
@pytest.mark.parametrize("records", [2, 10, 1000, 50_000, 10_000_000])
@pytest.mark.parametrize("epsilon", [0.1, 1, 8.0, 50.0])
def test_every_recipe_is_a_valid_run(task: str, records: int, epsilon: float) -> None:
    recipe = lsg.recommend(records=records, epsilon=epsilon, task=task)
    assert 1 <= recipe.batch_size <= records and 0 < recipe.delta < 1 / records and recipe.why
    RunConfig(
        task="digits",
        model=recipe.model or "small-cnn",
        epsilon=epsilon,
        **{
            name: getattr(recipe, name)
            for name in ("delta", "trainable", "pooling", "clipping", "max_grad_norm", "optimizer", "lr", "head_lr")
        },
        lr_schedule=recipe.lr_schedule,
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
    )
    assert len(str(recipe).splitlines()) == 5


def test_language_models_take_the_published_rule(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    recipe = lsg.recommend(records=42_000, epsilon=8.0, task="generate")
    assert (recipe.batch_size, recipe.clipping, recipe.method, recipe.lr) == (1025, "automatic", RGP(rank=8), 5e-4)
    assert "published, not measured by us" in str(recipe) and "train the weight matrices of its blocks" in str(recipe)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path))
    assert lsg.recommend(model, records=42_000, epsilon=8.0) == recipe
    adapted = with_adapters(model, 2)
    thin = lsg.recommend(adapted, records=42_000, epsilon=8.0)
    assert thin == lsg.recommend(records=42_000, epsilon=8.0, task="generate", adapters=True)
    assert thin.method == DPSGD() and "train adapters alone (LoRA)" in str(thin)


@pytest.mark.parametrize(("records", "trainable"), [(2000, "head"), (10_000, "paper"), (67_349, "paper")])
def test_words_with_tags_take_the_rule_for_texts_without_its_pooling(records: int, trainable: str) -> None:
    from transformers import BertConfig, BertForTokenClassification

    recipe = lsg.recommend(records=records, epsilon=3.0, task="tokens")
    texts = lsg.recommend(records=records, epsilon=3.0, task="text")
    assert recipe == replace(texts, pooling="model", why=recipe.why) and recipe.trainable == trainable
    assert "not measured for tags" in str(recipe) and "features are computed once" not in str(recipe)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    assert lsg.recommend(BertForTokenClassification(BertConfig(**sizes)), records=records, epsilon=3.0) == recipe


def test_the_arguments_are_those_of_the_engine() -> None:
    data = TensorDataset(torch.randn(64, 5), torch.randint(2, (64,)))
    model = nn.Linear(5, 2)
    recipe = lsg.recommend(model, records=len(data), epsilon=8.0)
    _, optimizer, _ = lsg.PrivacyEngine(accountant="rdp").make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=recipe.lr),
        data_loader=DataLoader(data, batch_size=recipe.batch_size),
        **recipe.arguments(),
    )
    assert recipe.model is None and "your own network" in str(recipe) and "momentum 0.9" in str(recipe)
    assert optimizer.max_grad_norm == recipe.max_grad_norm
    assert optimizer.expected_batch_size == recipe.batch_size


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"records": 1}, "records=1"),
        ({"records": 2.5}, "records=2.5"),
        ({"epsilon": 0}, "epsilon=0"),
        ({"epsilon": float("inf")}, "epsilon=inf"),
        ({"delta": 0.01}, "delta=0.01"),
        ({"task": "sound"}, "task='sound'"),
        ({"task": None}, "needs a model"),
    ],
)
def test_bad_numbers_are_refused_by_name(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(lsg.ConfigurationError, match=complaint):
        lsg.recommend(**{"records": 1000, "epsilon": 1.0, "task": "text"} | given)
