"""A stand-in for `lsg.train.run.run` that writes the same files in no time, and can be told to fail or die."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lsg.reproduce.store import cell_name
from lsg.train.config import RunConfig

CURVE = (0.25, 0.5)


def score_of(config: RunConfig) -> float:
    """Different for each method, rank, sparsity and seed, so that a table's places can be told apart."""
    base = {"lsg": 0.80, "rgp": 0.70, "sparse-dpsgd": 0.60, "dpsgd": 0.50, "non-private": 0.95}[config.method]
    return base + config.rank / 1000 + config.sparsity / 100 + config.seed / 50


class Killed(BaseException):
    """What SIGKILL is like: nothing below catches it."""


class FakeRun:
    """calls: (cell's name, whether resumed), in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.before_result: Callable[[RunConfig, Path], None] = lambda config, output: None

    def __call__(self, config: RunConfig, output: Path, *, resume: bool = False, listener: Any = None) -> None:
        self.calls.append((cell_name(config), resume))
        if output.exists() and any(output.iterdir()) and not resume:
            raise AssertionError(f"{output} is not empty")
        output.mkdir(parents=True, exist_ok=True)
        (output / "config.toml").write_text("")
        (output / "checkpoint").mkdir(exist_ok=True)
        self.before_result(config, output)
        (output / "model").mkdir(exist_ok=True)
        (output / "checkpoint").rmdir()
        result = {
            "config": config.to_dict(),
            "score": score_of(config),
            "scores": {"test": score_of(config)},
            "epsilon": config.epsilon,
            "curve": [*CURVE, score_of(config)],
            "seconds": 1.5,
        }
        (output / "result.json").write_text(json.dumps(result))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]
