"""Hand-written attacks by theme. Importing this package collects them all in `CASES`."""

from tests.adversarial.cases import (  # noqa: F401  (each registers its cases)
    attacks,
    broken_records,
    embeddings,
    gates,
    hooks_and_state,
    layouts,
    loops,
    losses,
    masks,
    partial_forwards,
    statistics,
    transformers_like,
)
from tests.adversarial.cases.collection import CASES, Case

__all__ = ["CASES", "Case"]
