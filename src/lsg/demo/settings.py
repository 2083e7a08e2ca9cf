"""What the runs of the demo share in, one run of `lsg train` for a method and an ε out."""

import math
from dataclasses import dataclass
from typing import Any

from lsg.errors import ConfigurationError
from lsg.methods import METHODS
from lsg.tasks.names import TRAIN_IMAGES
from lsg.train.choose import choose_settings
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.presets import preset

RECIPE = "recipe"  # beside the methods: what `lsg train` chooses by itself
CONTENDERS = (RECIPE, *METHODS)
NETWORK = "small-cnn"
# Of six rates from 0.05 to 1.6, the same for each method, the one with the best mean at ε = 1 and 3 on a fifth of the
# training images (one seed), never on test images: benchmarks/demo_rates.py, results/tune/demo-rates.jsonl. It is not
# part of the ε reported; on private data it would have to be.
RATES = {"lsg": 0.8, "rgp": 0.4, "dpsgd": 0.4}
_USUAL = preset("digits", "lsg")


@dataclass(frozen=True)
class Settings:
    """lr: of all private methods; None gives each its own. The recipe has epochs, batches, clip and rate of its own."""

    epsilons: tuple[float, ...] = (1.0, 3.0)
    delta: float = _USUAL["delta"]
    epochs: int = 20
    batch_size: int = _USUAL["batch_size"]
    max_grad_norm: float = _USUAL["max_grad_norm"]
    lr: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        positive = [("epsilon", epsilon) for epsilon in self.epsilons] + [("max_grad_norm", self.max_grad_norm)]
        for name, value in positive + ([] if self.lr is None else [("lr", self.lr)]):
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{name}={value:g} must be positive and finite")
        if not 0 < self.delta < 1 / TRAIN_IMAGES:
            raise ConfigurationError(
                f"delta={self.delta:g} must be above 0 and below 1/N = {1 / TRAIN_IMAGES:.3g} (N = {TRAIN_IMAGES} "
                "training images): a larger one allows publishing a record outright"
            )
        if self.epochs < 1:
            raise ConfigurationError(f"epochs={self.epochs} must be at least 1")
        if not 1 <= self.batch_size <= TRAIN_IMAGES:
            raise ConfigurationError(f"batch_size={self.batch_size} must lie between 1 and {TRAIN_IMAGES}")
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"seed={self.seed} must lie between 0 and 2^63 - 1")

    def configs(self, contender: str) -> list[RunConfig]:
        """Its runs, one for each ε; of non-private training one."""
        if contender == RECIPE:
            given: dict[str, Any] = {"task": "digits", "delta": self.delta, "seed": self.seed, "device": "cpu"}
            return [choose_settings({**given, "epsilon": e}, "lsg demo", Listener()) for e in self.epsilons]
        same: dict[str, Any] = {
            "task": "digits",
            "model": NETWORK,
            "method": contender,
            "seed": self.seed,
            "device": "cpu",
        }
        same |= {"batch_size": self.batch_size, "epochs": self.epochs, "max_grad_norm": self.max_grad_norm}
        same = {**preset("digits", contender), **same, "delta": self.delta}
        if contender == "non-private":
            return [RunConfig(**same)]
        rate = self.lr or RATES.get(contender, same["lr"])
        return [RunConfig(**{**same, "lr": rate, "epsilon": epsilon}) for epsilon in self.epsilons]


def chosen(names: str) -> list[str]:
    """Names of CONTENDERS; capital letters and missing dashes are forgiven."""
    by_letters = {name.replace("-", ""): name for name in CONTENDERS}
    wanted = {name.strip().lower().replace("-", ""): name.strip().lower() for name in names.split(",") if name.strip()}
    for letters, name in wanted.items():
        if letters not in by_letters:
            raise ConfigurationError(f"methods: '{name}' is not known; choose from {', '.join(CONTENDERS)}")
    if not wanted:
        raise ConfigurationError(f"methods: none given; choose from {', '.join(CONTENDERS)}")
    return [by_letters[letters] for letters in wanted]
