"""The recipe for words with tags and a pretrained model: number of records and ε in, what to train and how out.

The rule is that of `lsg.recipes.text`, without its pooling: each word has an answer of its own. It was not measured for
tags.
"""

from dataclasses import replace

from lsg.recipes.recipe import Recipe
from lsg.recipes.text import text_recipe


def tokens_recipe(records: int, epsilon: float, delta: float) -> Recipe:
    recipe = text_recipe(records, epsilon, delta)
    why = _HEAD if recipe.trainable == "head" else _FINE_TUNED
    return replace(recipe, pooling="model", why=("the rule for texts, by records times ε, not measured for tags:", why))


_HEAD = "noise would drown the gradients of an encoder, so that a linear layer on it learns alone."
_FINE_TUNED = (
    "enough to fine-tune, with little noise in low rank; a new head needs a higher rate than pretrained weights."
)
