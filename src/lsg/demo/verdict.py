"""Runs and costs of the demo in, where low rank wins and where it does not out: words that follow from the numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lsg.demo.runs import DemoRun
from lsg.demo.settings import RECIPE
from lsg.demo.wide import Cost

LOW_RANK = ("lsg", "rgp")
CLEAR = 2.0  # standard errors of a difference, and so what chance leaves open
FASTER = 1.1  # times as fast: less is the machine's own unrest


@dataclass(frozen=True)
class Finding:
    """side: 1 where low rank wins, -1 where it loses, 0 where neither is clear."""

    side: int
    text: str


def verdict(runs: Sequence[DemoRun], costs: Sequence[Cost]) -> list[str]:
    """Lines: what low rank wins, what is open, what it loses; then what `lsg train` chooses by itself."""
    findings = [*_accuracy(runs), *_cost(costs)]
    lines = []
    for side, head in ((1, "Low rank wins:"), (0, "No clear difference:"), (-1, "Low rank loses:")):
        texts = [f"  {finding.text}" for finding in findings if finding.side == side]
        lines += [head, *texts] if texts else []
    return [*lines, *_choice(runs)]


def _accuracy(runs: Sequence[DemoRun]) -> Iterator[Finding]:
    """Each low-rank method beside DPSGD with the same network at the same ε."""
    dense = {run.epsilon: run for run in runs if run.contender == "dpsgd"}
    for run in runs:
        other = dense.get(run.epsilon)
        if run.contender in LOW_RANK and other is not None:
            difference, error = run.score - other.score, math.hypot(run.error, other.error)
            side = 0 if abs(difference) <= CLEAR * error else int(math.copysign(1, difference))
            gap = f"{_points(difference)} ± {100 * error:.1f}"
            yield Finding(side, f"accuracy at ε = {run.epsilon:g}: {run.contender.upper()} {gap} against DPSGD")


def _cost(costs: Sequence[Cost]) -> Iterator[Finding]:
    """Each low-rank method beside DPSGD in a wide network. Time: beside the fastest DPSGD, Opacus's among them."""
    dense = [cost for cost in costs if cost.contender in ("dpsgd", "opacus")]
    if not dense:
        return
    other, fastest = dense[0], min(dense, key=lambda cost: cost.milliseconds)
    for cost in (cost for cost in costs if cost.contender in LOW_RANK):
        name, ratio = cost.contender.upper(), fastest.milliseconds / cost.milliseconds
        yield Finding(
            1 if cost.noised < other.noised else -1,
            f"size in the wide network: {name} noises {cost.noised:,} numbers ({_size(cost.bytes)} a record), "
            f"DPSGD {other.noised:,} ({_size(other.bytes)})",
        )
        side = 1 if ratio > FASTER else -1 if ratio < 1 / FASTER else 0
        yield Finding(side, f"time in the wide network: {name} is {ratio:.1f} times as fast as {fastest.label}")


def _choice(runs: Sequence[DemoRun]) -> Iterator[str]:
    """What `lsg train` takes by itself, beside the best of the other private runs."""
    for run in (run for run in runs if run.contender == RECIPE):
        config = run.result.config
        text = f"lsg train's choice at ε = {run.epsilon:g}: {config.make_method()} on {config.model}"
        others = [other for other in runs if other.contender != RECIPE and other.epsilon == run.epsilon]
        if others:
            best = max(others, key=lambda other: other.score)
            text += f", {_points(run.score - best.score)} against the best other ({best.label})"
        yield text


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f} points"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
