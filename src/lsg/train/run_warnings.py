"""What is wrong with a run: its rows of metrics in, warnings out, each with what to do. The gravest comes first.

Every check is one function of the rows so far and of the run's facts, and says nothing or one warning: a new one is a
line in `_CHECKS`. A run that is warned of ends as any other.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Row = dict[str, Any]  # of metrics.jsonl

# A share of clipped gradients as near to 0 or 1 as this is "nothing" or "everything".
FEW = 0.01
# Standard errors by which a score must be above that of always giving one answer to be told from it.
ERRORS = 2.0
# All signals of a run over all its noise: below one half, less than a fifth of the squared length of what moved the
# weights is signal, at best.
DROWNED = 0.5
# Weights beyond this are nobody's: those of trained networks seldom reach 100.
HUGE = 1e6


@dataclass(frozen=True)
class RunWarning:
    """text: what is wrong, and what to do. releasable: nothing in it comes from private data without noise."""

    name: str
    text: str
    releasable: bool = False


@dataclass(frozen=True)
class OneAnswer:
    """What always giving the most frequent answer scores on a part of the evaluation data, of so many records.

    error: the score's standard error, where a record has more answers than one.
    """

    score: float
    records: int
    error: float | None = None

    @property
    def told_from(self) -> float:
        """A score up to here may be that of one answer, by chance."""
        error = math.sqrt(self.score * (1 - self.score) / self.records) if self.error is None else self.error
        return self.score + ERRORS * error


@dataclass(frozen=True)
class RunFacts:
    """What the checks compare a run's rows with. steps, epochs: of the whole run. one_answer: by part, of accuracies.

    scored_apart: evaluation data came as a part of their own. Else they are records of the same file as those trained
        on, as private as these, and no warning about the score may be released.
    untrained: of a language model, its perplexity before training.
    """

    steps: int
    epochs: int
    max_grad_norm: float
    one_answer: dict[str, OneAnswer]
    scored_apart: bool = True
    untrained: float | None = None


def find_warnings(rows: Sequence[Row], facts: RunFacts) -> list[RunWarning]:
    """rows: from the first epoch to the last one so far. Nothing is said before it is clear."""
    found = [check(rows, facts) for check in _CHECKS] if rows else []
    return [warning for warning in found if warning is not None]


def weight_warnings(weights: Iterable[Tensor]) -> list[RunWarning]:
    """Of the weights at the end. They are what is released, so that this tells nothing more."""
    sizes = [float(weight.detach().abs().max()) for weight in weights if weight.numel()]
    if not all(map(math.isfinite, sizes)):
        text = "training diverged, and weights are not finite: try a lower --lr"
    elif max(sizes, default=0.0) > HUGE:
        text = f"training diverged: weights are as large as {max(sizes):.1e}, and trained ones rarely pass 10. Try a "
        text += "lower --lr"
    else:
        return []
    return [RunWarning("weights", text, releasable=True)]


def ended_early(steps: int, planned: int) -> RunWarning:
    """Steps that were charged took the place of planned ones. Nothing of this comes from data."""
    return RunWarning(
        "ended early",
        f"the budget was used up before the end: of {planned:,} planned steps {steps:,} were trained and kept, as "
        "steps that a crash lost, and that could not be repeated, count as spent. A run that is saved more often "
        "(--checkpoint-every) loses fewer",
        releasable=True,
    )


def _loss_not_finite(rows: Sequence[Row], facts: RunFacts) -> RunWarning | None:
    last = rows[-1]
    if last["loss"] is not None or not last["samples_per_second"]:  # an epoch without samples has no loss
        return None
    return RunWarning("loss", "the training loss is not finite (not private): try a lower --lr")


def _score_of_one_answer(rows: Sequence[Row], facts: RunFacts) -> RunWarning | None:
    """Many runs begin with one answer for everything, so this counts from half of the run on."""
    last = rows[-1]
    if not facts.one_answer or not _half_way(rows, facts):
        return None
    if any(last["scores"][part] > one.told_from for part, one in facts.one_answer.items()):
        return None
    baseline = sum(one.score for one in facts.one_answer.values()) / len(facts.one_answer)
    return RunWarning(
        "one answer",
        f"the score, {100 * last['score']:.1f} %, is not clearly better than that of always giving the most frequent "
        f"answer, {100 * baseline:.1f} %, on {sum(one.records for one in facts.one_answer.values()):,} records. Try "
        "another --lr, more --epochs, more records or a larger --epsilon",
        releasable=facts.scored_apart,
    )


def _no_better_than_untrained(rows: Sequence[Row], facts: RunFacts) -> RunWarning | None:
    """Of a language model; noise makes most of them worse before they become better."""
    last = rows[-1]
    if facts.untrained is None or last["score"] < facts.untrained or not _half_way(rows, facts):
        return None
    return RunWarning(
        "untrained",
        f"the perplexity, {last['score']:.4g}, is no lower than before training, {facts.untrained:.4g}. Try another "
        "--lr, more --epochs, more records or a larger --epsilon",
        releasable=facts.scored_apart,
    )


def _noise_drowns_signal(rows: Sequence[Row], facts: RunFacts) -> RunWarning | None:
    """In one step noise is longer than the signal in almost every private run that learns: noise fills all dimensions.

    Over T steps signals that agree add up to T times one, noise to sqrt(T) times one. So T steps are compared: if
    even signals that all agree would be much shorter than the noise, the weights went where the noise pushed them.
    """
    signal, noise = _mean(rows, "signal_norm"), _mean(rows, "noise_norm")
    if signal is None or not noise:
        return None
    over_the_run = signal * math.sqrt(facts.steps) / noise
    if over_the_run >= DROWNED:
        return None
    times = f"{1 / over_the_run:.1f} times" if over_the_run > 1e-3 else "more than a thousand times"
    return RunWarning(
        "noise",
        f"noise drowns the signal: over {facts.steps:,} steps the noise is {times} as long as all signals together, "
        "if they agree (not private). It takes more records, a larger --epsilon, or, where there is room, a larger "
        "--batch-size or fewer trained numbers (--trainable head; of a language model, --lora)",
    )


def _nothing_clipped(rows: Sequence[Row], facts: RunFacts) -> RunWarning | None:
    share = _mean(rows, "clip_share")
    if share is None or share > FEW:
        return None
    return RunWarning(
        "nothing clipped",
        f"almost nothing is clipped ({100 * share:.1f} % of the gradients, not private), and noise is scaled to "
        f"--max-grad-norm {facts.max_grad_norm:g}, which they do not reach. Lower it, or use --clipping automatic",
    )


def _everything_clipped(rows: Sequence[Row], facts: RunFacts) -> RunWarning | None:
    """Gradients become shorter while a model learns: the last epoch counts, and from half of the run on."""
    share = rows[-1].get("clip_share")
    if share is None or share < 1 - FEW or not _half_way(rows, facts):
        return None
    return RunWarning(
        "everything clipped",
        f"almost everything is clipped ({100 * share:.1f} % of the gradients, not private): only directions count, and "
        f"--max-grad-norm {facts.max_grad_norm:g} acts as a factor on --lr. Use --clipping automatic, which is the "
        "same without a threshold to choose, or raise --max-grad-norm",
    )


_CHECKS = (
    _loss_not_finite,
    _score_of_one_answer,
    _no_better_than_untrained,
    _noise_drowns_signal,
    _nothing_clipped,
    _everything_clipped,
)


def _half_way(rows: Sequence[Row], facts: RunFacts) -> bool:
    return bool(rows[-1]["epoch"] >= facts.epochs / 2)


def _mean(rows: Sequence[Row], key: str) -> float | None:
    """Over the epochs that have it; rows of older versions have none of the signals."""
    found = [row[key] for row in rows if row.get(key) is not None]
    return sum(found) / len(found) if found else None
