"""A run that stands in for a private one: a configuration and its noise in, one for other or fewer records out.

It takes as many steps, and the noise on a step's mean gradient is the same: noise multiplier over batch size. That
ratio and the number of steps decide how noisy training is, and batches can be smaller (Sander, Stock & Sablayrolles,
"TAN without a burn", ICML 2023, arXiv:2210.03403). It promises no privacy: its noise is too little for its own batches.
"""

from dataclasses import replace

from lsg.accounting.budget import safe_delta
from lsg.train.config import RunConfig


def stand_in(config: RunConfig, noise_multiplier: float, *, records: int, own_records: int, shrink: int) -> RunConfig:
    """config, noise_multiplier: of the run on `records` private records. own_records: those the stand-in trains on.

    Its batches are about `shrink` times smaller, and no larger than its records. Epochs are whole, and the batch
    follows from them, so that the number of steps stays.
    """
    steps = config.epochs * records / config.batch_size
    epochs = max(1, round(steps * min(config.batch_size / shrink, own_records) / own_records))
    batch_size = min(own_records, max(1, round(own_records * epochs / steps)))
    return replace(
        config,
        epochs=epochs,
        batch_size=batch_size,
        epsilon=None,
        noise_multiplier=noise_multiplier * batch_size / config.batch_size,
        delta=min(config.delta, safe_delta(own_records)),
        accountant="rdp",  # nobody reads this ε
    )
