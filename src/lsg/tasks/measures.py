"""What a score of a task is: its name, which of two is better, and how people read it."""

import math
from dataclasses import dataclass

from lsg.tasks.names import KINDS

LARGEST = 1e30  # stands for any perplexity that is larger, or not finite


@dataclass(frozen=True)
class Measure:
    """best_is_high: of accuracy, a share of the records; not of perplexity, which is 1 at best."""

    name: str
    best_is_high: bool

    @property
    def heading(self) -> str:
        """Of a column with `shown` numbers."""
        return f"{self.name} %" if self.best_is_high else f"{self.name} (lower is better)"

    def shown(self, score: float) -> float:
        """The number that people read: accuracy in per cent."""
        return 100 * score if self.best_is_high else score

    def text(self, score: float) -> str:
        return f"{100 * score:.2f} %" if self.best_is_high else f"{score:,.2f}" if score < 1e6 else f"{score:.3g}"

    def labelled(self, score: float) -> str:
        """With its name, where people expect another one."""
        return f"score {self.text(score)}" if self.best_is_high else f"{self.name} {self.text(score)} (lower is better)"

    def is_better(self, score: float, other: float) -> bool:
        return score > other if self.best_is_high else score < other


ACCURACY = Measure("accuracy", best_is_high=True)
PERPLEXITY = Measure("perplexity", best_is_high=False)


MEASURES = {measure.name: measure for measure in (ACCURACY, PERPLEXITY)}


def measure_of(task: object) -> Measure:
    """task: its name. Of one that nobody knows any more, accuracy."""
    return PERPLEXITY if isinstance(task, str) and KINDS.get(task) == "generate" else ACCURACY


def perplexity(log_likelihood: float, tokens: int) -> float:
    """exp of the mean negative log-likelihood of a token."""
    mean = -log_likelihood / max(tokens, 1)
    return math.exp(mean) if mean < math.log(LARGEST) else LARGEST  # NaN is not below it
