"""The recipe for texts with a pretrained model: number of records and ε in, what to train and how out.

The rules come from runs of all-MiniLM-L6-v2 on parts of SST-2: docs/what-helps.md.
"""

import math

from lsg.methods import DPSGD, RGP
from lsg.recipes.recipe import Recipe

# Records times ε. Below the first, noise drowns the gradients of an encoder; from the second on it can also learn a
# deeper head than a linear layer.
FINE_TUNE_FROM, OWN_HEAD_FROM = 15_000, 100_000


def text_recipe(records: int, epsilon: float, delta: float) -> Recipe:
    """A head on pooled features for little data or a small ε, else all weight matrices in low rank."""
    if records * epsilon < FINE_TUNE_FROM:
        return _head_alone(records, epsilon, delta)
    if records * epsilon < OWN_HEAD_FROM:
        return _fine_tuned(records, epsilon, delta)
    return _with_own_head(records, epsilon, delta)


def _head_alone(records: int, epsilon: float, delta: float) -> Recipe:
    return Recipe(
        records=records,
        epsilon=epsilon,
        delta=delta,
        trainable="head",
        pooling="mean",
        method=DPSGD(),
        lr=0.03,
        batch_size=records,
        epochs=40,
        why=(
            "records times ε is small: noise would drown the gradients of an encoder, and a linear layer on its",
            "features learns at once. Low rank would save nothing on a head. Batches of all records have the",
            "least noise a record, and cost little, as features are computed once.",
        ),
    )


def _fine_tuned(records: int, epsilon: float, delta: float) -> Recipe:
    return Recipe(
        records=records,
        epsilon=epsilon,
        delta=delta,
        trainable="paper",
        pooling="mean",
        method=RGP(rank=8),
        lr=1e-3,
        head_lr=10.0,
        batch_size=_batch(records),
        epochs=20,
        why=(
            "enough records to fine-tune. Low rank keeps noise and memory small; masks (lsg) gained nothing over it",
            "on texts. A new head needs a higher rate than pretrained weights.",
        ),
    )


def _with_own_head(records: int, epsilon: float, delta: float) -> Recipe:
    return Recipe(
        records=records,
        epsilon=epsilon,
        delta=delta,
        trainable="paper",
        method=RGP(rank=8, head_scale=0.1),
        clipping="flat",
        max_grad_norm=0.1,
        lr=1e-3,
        batch_size=_batch(records),
        epochs=20,
        why=(
            "so many records train the model's own, deeper head, too. Low rank keeps noise and memory small; masks",
            "(lsg) gained nothing over it on texts. A threshold below nearly all norms weighs records alike.",
        ),
    )


def _batch(records: int) -> int:
    """It grows with the root of the records: 1,000 of 10,000."""
    return min(records, 100 * round(math.sqrt(records) / 10))
