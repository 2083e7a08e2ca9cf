"""The recipe for images from scratch: number of records and ε in, which network to train and how out.

Rates and batches are those of Tramèr and Boneh 2021, in proportion where there are fewer records than one of their
batches. On Fashion-MNIST at ε = 3 the linear layer has 89.7 % (three seeds); on CIFAR-10 at ε = 3.3 the small network
has 67.2 % and the linear layer 64.7 % (one seed): docs/what-helps.md.
"""

from lsg.methods import DPSGD
from lsg.recipes.recipe import Recipe

CNN_FROM = 150_000  # records times ε: from it on a small network on features of colour images gains over a linear layer
BATCH = 8192


def image_recipe(records: int, epsilon: float, delta: float, channels: int) -> Recipe:
    """Wavelet features, which are the same for all data, under a linear layer or a small network."""
    deeper = channels > 1 and records * epsilon >= CNN_FROM
    batch = min(records, BATCH)
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
        lr=4.0 if deeper else max(4.0, 16.0 * batch / BATCH),
        lr_schedule="constant",
        batch_size=batch,
        epochs=60 if deeper else 40,
        why=(
            "from scratch, features that need no training learn most from few private steps",
            "(Tramèr and Boneh 2021); these networks are so small that low rank would save nothing.",
        ),
    )
