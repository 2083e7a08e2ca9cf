"""The result of a run, to the values of result.json and back."""

from dataclasses import dataclass, field
from typing import Any

from lsg.errors import ConfigurationError
from lsg.train.config import RunConfig
from lsg.train.stored_settings import stored_config


@dataclass(frozen=True)
class RunResult:
    """What result.json holds. epsilon: None without privacy. seconds: of training. history: metrics.jsonl's rows.

    warnings: what is wrong with the run, the gravest first. Not private. processes: that trained together at its end.
    measure: what a score is; of perplexity the lower one is the better. untrained: the score
    of a language model before training.
    """

    config: RunConfig
    score: float
    scores: dict[str, float]
    epsilon: float | None
    noise_multiplier: float
    steps: int
    curve: list[float]
    seconds: float
    history: list[dict[str, Any]]
    privacy: dict[str, Any]
    provenance: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    processes: int = 1
    measure: str = "accuracy"
    untrained: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> "RunResult":
        """The inverse of `to_dict`. `source` names the file in errors."""
        try:
            known = {key: value for key, value in values.items() if key != "secret"}
            return cls(**{**known, "config": stored_config(values["config"], source)})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{source} is damaged: it is no result of a run ({error})") from None
