"""The recipe for a pretrained language model: number of records and ε in, what to train and how out.

The rule is published, and its rates not measured by us (docs/train.md has others): GPT-2 on 42,000 records, fine-tuned
in batches of about 1,000 with a low clipping threshold at rates of 5e-4 to 1e-3 (Li et al. 2022), or by adapters of low
rank alone (Yu et al. 2022); automatic clipping needs the same rates and no threshold (Bu et al. 2023).
"""

import math

from lsg.methods import DPSGD, RGP
from lsg.recipes.recipe import Recipe

RANK = 8
BATCH = 5  # times the square root of the number of records: 1,000 of 42,000


def generate_recipe(records: int, epsilon: float, delta: float, *, adapters: bool) -> Recipe:
    """adapters: LoRA's are trained, whose matrices are thin already; else all matrices of the blocks, in low rank."""
    return Recipe(
        records=records,
        epsilon=epsilon,
        delta=delta,
        trainable="paper",
        trained="adapters alone (LoRA)" if adapters else "the weight matrices of its blocks",
        method=DPSGD() if adapters else RGP(rank=RANK),
        lr=1e-3 if adapters else 5e-4,
        batch_size=min(records, round(BATCH * math.sqrt(records))),
        epochs=10,
        why=(
            "published, not measured by us: large batches, no threshold to tune, and low rank keep noise and memory",
            "small (Li et al. 2022; Yu et al. 2022; Bu et al. 2023). Few records at a small ε teach a language model",
            "little: compare its perplexity with that of the model as it was.",
        ),
    )
