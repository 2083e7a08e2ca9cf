"""The recipe for texts with a pretrained model: number of records and ε in, what to train and how out.

The rules come from runs of all-MiniLM-L6-v2 and all-mpnet-base-v2 on parts of SST-2: docs/what-helps.md.
"""

import math
from typing import Any

from lsg.methods import DPSGD, RGP
from lsg.recipes.recipe import Recipe

# Records times ε. Below the first, noise drowns the gradients of an encoder; from the second on there is signal for
# more directions of each weight.
FINE_TUNE_FROM, WIDER_FROM = 10_000, 100_000


def text_recipe(records: int, epsilon: float, delta: float) -> Recipe:
    """A head on pooled features for little data or a small ε, else all weight matrices in low rank."""
    signal = records * epsilon
    chosen = head_alone(records) if signal < FINE_TUNE_FROM else _fine_tuned(records, 8 if signal < WIDER_FROM else 16)
    return Recipe(records=records, epsilon=epsilon, delta=delta, pooling="mean", **chosen)


def head_alone(records: int) -> dict[str, Any]:
    return {
        "trainable": "head",
        "method": DPSGD(),
        "lr": 0.03,
        "batch_size": records,
        "epochs": 40,
        "why": (
            "records times ε is small: noise would drown the gradients of an encoder, and a linear layer on its",
            "features learns at once. Low rank would save nothing on a head. Batches of all records have the",
            "least noise a record, and cost little, as features are computed once.",
        ),
    }


def _fine_tuned(records: int, rank: int) -> dict[str, Any]:
    return {
        "trainable": "paper",
        "method": RGP(rank=rank),
        "lr": 1e-3,
        "head_lr": 10.0,
        "batch_size": min(records, 100 * round(math.sqrt(records) / 10)),  # 1,000 of 10,000
        "epochs": 20,
        "why": (
            "enough records to fine-tune. Low rank keeps noise and memory small; masks (lsg) gained nothing over it",
            "on texts. A new head needs a higher rate than pretrained weights.",
        ),
    }
