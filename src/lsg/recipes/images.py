"""The recipe for images from scratch: number of records and ε in, which network to train and how out.

The numbers come from the study in docs/what-helps.md.
"""

from lsg.methods import DPSGD
from lsg.recipes.recipe import Recipe

CNN_FROM = 150_000  # records times ε: from it on a small network on wavelet features gains over a linear layer


def image_recipe(records: int, epsilon: float, delta: float) -> Recipe:
    """Wavelet features, which are the same for all data, under a linear layer or a small network."""
    deeper = records * epsilon >= CNN_FROM
    return Recipe(
        records=records,
        epsilon=epsilon,
        delta=delta,
        model="scatter-cnn" if deeper else "scatter-linear",
        trainable="all",
        method=DPSGD(),
        clipping="flat",
        max_grad_norm=0.1,
        optimizer="sgd",
        lr=4.0,
        lr_schedule="constant",
        batch_size=min(records, 8192),
        epochs=60 if deeper else 40,
        why=(
            "from scratch, features that need no training learn most from few private steps",
            "(Tramèr and Boneh 2021); these networks are so small that low rank would save nothing.",
        ),
    )
