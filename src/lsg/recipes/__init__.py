"""`lsg.recommend`: number of records, ε and the model in, a recipe out. `lsg train --recipe auto` uses it, too."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from lsg.accounting.budget import safe_delta
from lsg.errors import ConfigurationError
from lsg.files.plain_numbers import plain
from lsg.recipes.generate import generate_recipe
from lsg.recipes.images import image_recipe
from lsg.recipes.recipe import Recipe, has_adapters, is_transformer, tags_words, writes_texts
from lsg.recipes.text import text_recipe
from lsg.recipes.tokens import tokens_recipe

if TYPE_CHECKING:
    from torch import nn

KINDS = ("text", "tokens", "image", "generate")
_OWN_NETWORK = (
    "your own network, from scratch: rate and threshold are those that suit small networks on images, so try others",
    '(lsg tune). Without a model, task="image" names a network that learns more from few private steps.',
)

__all__ = ["KINDS", "Recipe", "recommend"]


def recommend(
    model: nn.Module | None = None,
    *,
    records: int,
    epsilon: float,
    delta: float | None = None,
    task: str | None = None,
    channels: int = 3,
    adapters: bool | None = None,
) -> Recipe:
    """What to train, and how, for this many records at this ε: the choice that did best in our studies.

    records: training records, or persons with `unit_of`. delta: without it a tenth of 1/records, or less. task: "text"
    (a pretrained model of transformers), "tokens" (one that tags words), "generate" (a pretrained language model) or
    "image" (a network from scratch); without it the model tells. channels: of images, 1 where they are grey.
    adapters: of a language model, LoRA's alone are trained; without it the model tells.
    It looks at no record, so it costs no privacy.

        recipe = lsg.recommend(model, records=len(data), epsilon=3.0)
        print(recipe)
        engine.make_private_with_epsilon(module=model, optimizer=..., data_loader=..., **recipe.arguments())
    """
    records, epsilon, delta = plain(records), plain(epsilon), plain(delta)
    if not isinstance(records, int) or records < 2:
        raise ConfigurationError(f"records={records!r} must be a whole number of at least 2")
    if not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise ConfigurationError(f"epsilon={epsilon!r} must be positive and finite")
    if delta is not None and not 0 < delta < 1 / records:
        raise ConfigurationError(f"delta={delta!r} must be above 0 and below 1/records = {1 / records:.3g}")
    if task is None:
        if model is None:
            raise ConfigurationError(f"recommend needs a model, or task=, one of {', '.join(KINDS)}")
        task = _task_of(model)
    if task not in KINDS:
        raise ConfigurationError(f"task={task!r} must be one of {', '.join(KINDS)}")
    delta = safe_delta(records) if delta is None else delta
    if task == "text":
        return text_recipe(records, epsilon, delta)
    if task == "tokens":
        return tokens_recipe(records, epsilon, delta)
    if task == "generate":
        return generate_recipe(records, epsilon, delta, adapters=has_adapters(model) if adapters is None else adapters)
    recipe = image_recipe(records, epsilon, delta, channels)
    return recipe if model is None else replace(recipe, model=None, why=_OWN_NETWORK)


def _task_of(model: nn.Module) -> str:
    if not is_transformer(model):
        return "image"
    return "generate" if writes_texts(model) else "tokens" if tags_words(model) else "text"
