"""A finished run of the demo in; its names, its error and its numbers for results.json out."""

import math
from dataclasses import dataclass
from typing import Any

from lsg.demo.settings import RECIPE
from lsg.tasks.digits import TEST_IMAGES
from lsg.train.result import RunResult


@dataclass(frozen=True)
class DemoRun:
    """contender: a method's name, or RECIPE. epsilon: the target; None without privacy."""

    contender: str
    result: RunResult

    @property
    def label(self) -> str:
        return "lsg train's choice" if self.contender == RECIPE else str(self.result.config.make_method())

    @property
    def epsilon(self) -> float | None:
        return self.result.config.epsilon

    @property
    def score(self) -> float:
        """Of the last epoch, not the best one: that would be picked on test data."""
        return self.result.score

    @property
    def error(self) -> float:
        """Standard error of the score, from the number of test images alone (binomial)."""
        return math.sqrt(self.score * (1 - self.score) / TEST_IMAGES)

    @property
    def noise_dimensions(self) -> int:
        return int(self.result.privacy["noise_dimensions"])

    def numbers(self) -> dict[str, Any]:
        """For results.json. epsilon: what was spent."""
        config = self.result.config
        return {
            "method": self.label,
            "target_epsilon": self.epsilon,
            "model": config.model,
            "test_accuracy": self.score,
            "test_accuracy_standard_error": self.error,
            "epsilon": self.result.epsilon,
            **{name: getattr(config, name) for name in ("lr", "max_grad_norm", "batch_size")},
            "noise_multiplier": self.result.noise_multiplier,
            "noise_dimensions": self.noise_dimensions,
            "training_seconds": self.result.seconds,
            "epochs": [_epoch(row) for row in self.result.history],
        }


def _epoch(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a run's metrics by the demo's own names."""
    samples = round(row["samples_per_second"] * row["seconds"])
    same = {key: row[key] for key in ("steps", "epsilon", "loss", "score", "seconds", "lr")}
    return {"number": row["epoch"], **same, "samples": samples}
