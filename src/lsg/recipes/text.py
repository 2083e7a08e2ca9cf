"""The recipe for texts with a pretrained model: number of records and ε in, what to train and how out.

The numbers come from the study in docs/what-helps.md.
"""

import math

from lsg.methods import DPSGD, RGP
from lsg.recipes.recipe import Recipe

HEAD_BELOW = 15_000  # records times ε: below it noise drowns the gradients of the encoder


def text_recipe(records: int, epsilon: float, delta: float) -> Recipe:
    """A head on pooled features for little data or a small ε, else all weight matrices in low rank."""
    if records * epsilon < HEAD_BELOW:
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
    return Recipe(
        records=records,
        epsilon=epsilon,
        delta=delta,
        trainable="paper",
        pooling="mean",
        method=RGP(rank=8),
        lr=1e-3,
        head_lr=10.0,
        batch_size=min(records, 100 * round(math.sqrt(records) / 10)),
        epochs=20,
        why=(
            "enough records to fine-tune. Low rank keeps noise and memory small; masks (lsg) gained nothing over it",
            "on texts. A new head needs a higher rate than pretrained weights.",
        ),
    )
