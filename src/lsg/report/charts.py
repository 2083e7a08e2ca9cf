"""What the page draws: a section's settings in, charts as plain JSON values out. The page's script only draws them."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lsg.methods import PRIVATE_METHODS
from lsg.report.runs import Epoch
from lsg.report.settings import BUDGET, Section, Setting, as_text
from lsg.tasks.measures import Measure

Chart = dict[str, Any]
Style = dict[str, str | int]
EPOCH = {"label": "epoch", "format": "whole", "scale": "linear"}
SCORES = {
    "accuracy": {"label": "accuracy, %", "format": "percent", "scale": "linear"},
    "perplexity": {"label": "perplexity (lower is better)", "format": "plain", "scale": "linear"},
}
EPSILON = {"label": "ε spent", "format": "epsilon", "scale": "linear"}
LOSS = {"label": "loss (not private)", "format": "plain", "scale": "linear"}
LENGTH = {"label": "L2 norm (not private)", "format": "plain", "scale": "log"}
CLIPPED = {"label": "clipped, % (not private)", "format": "percent", "scale": "linear"}
COLOURS, DASHES = 6, 4  # as many as the page's style and script have
_FULL = "full"  # the rank of methods that do not project
# Tuned for each method by itself, so they may differ within one heat map.
_TUNED = ("lr", "max_grad_norm")


def make_charts(section: Section) -> list[Chart]:
    """Those for which there is something to draw."""
    drawn = [setting for setting in section.settings if setting.runs[0].history]
    styles, measure = _styles(section.settings), section.measure
    name = measure.name.capitalize()
    charts = [
        _over_epochs(f"{name} over epochs", SCORES[measure.name], drawn, styles, partial(_shown, measure)),
        _against_epsilon(section.settings, styles, measure),
        _epsilon_over_epochs(drawn, styles),
        _over_epochs("Training loss over epochs (not private)", LOSS, drawn, styles, lambda epoch: epoch.loss),
        _signal_and_noise(drawn, styles),
        _over_epochs("Gradients clipped over epochs (not private)", CLIPPED, drawn, styles, _clipped_percent),
    ]
    return [chart for chart in charts if chart["series"]] + _heat_maps(section.settings, measure)


def _shown(measure: Measure, epoch: Epoch) -> float | None:
    return None if epoch.score is None else measure.shown(epoch.score)


def _clipped_percent(epoch: Epoch) -> float | None:
    return None if epoch.clip_share is None else 100 * epoch.clip_share


def _styles(settings: Sequence[Setting]) -> dict[str, Style]:
    """label -> colour and dash: one colour a line, and as many dashes of it as the line has settings.

    The longest lines choose first, so that two settings look alike only where there are more than looks.
    """
    lines = Counter(s.line for s in settings if not _is_reference(s))
    taken = dict.fromkeys((f"c{i}" for i in range(COLOURS)), 0)
    colours = {}
    for line, count in lines.most_common():
        colours[line] = min(taken, key=lambda colour: taken[colour])
        taken[colours[line]] += count
    styles: dict[str, Style] = {}
    used: Counter[str] = Counter()
    for setting in settings:
        colour = "reference" if _is_reference(setting) else colours[setting.line]
        styles[setting.label] = {"colour": colour, "dash": used[colour] % DASHES}
        used[colour] += 1
    return styles


def _is_reference(setting: Setting) -> bool:
    return bool(setting.config.get("method") == "non-private")


def _over_epochs(
    title: str,
    axis: dict[str, str],
    settings: Sequence[Setting],
    styles: dict[str, Style],
    value: Callable[[Epoch], float | None],
) -> Chart:
    series = []
    for setting in settings:
        points = _mean_over_epochs(setting, value)
        if points:
            series.append({"label": _with_count(setting), **styles[setting.label], "points": points})
    return {"kind": "lines", "title": title, "x": EPOCH, "y": axis, "series": series}


def _signal_and_noise(settings: Sequence[Setting], styles: dict[str, Style]) -> Chart:
    """Two lines a setting: the clipped mean of a step, and with another dash the noise on it."""
    signals = _over_epochs("", LENGTH, settings, styles, lambda epoch: epoch.signal_norm)["series"]
    noises = _over_epochs("", LENGTH, settings, styles, lambda epoch: epoch.noise_norm)["series"]
    series = [line | {"label": f"{line['label']}: signal"} for line in signals]
    series += [line | {"label": f"{line['label']}: noise", "dash": (line["dash"] + 1) % DASHES} for line in noises]
    for line in series:  # a logarithmic axis has no place for zero
        above = [point for point in line["points"] if point["y"] > 0]
        line["points"] = [p | {"std": p["std"] if p["std"] and p["std"] < p["y"] else None} for p in above]
    return {
        "kind": "lines",
        "title": "Signal against noise in a step, over epochs (not private)",
        "x": EPOCH,
        "y": LENGTH,
        "series": [line for line in series if line["points"]],
    }


def _mean_over_epochs(setting: Setting, value: Callable[[Epoch], float | None]) -> list[dict[str, float | None]]:
    """Mean and deviation over the runs, at the epochs that every one of them has."""
    columns: dict[int, list[float]] = defaultdict(list)
    for run in setting.runs:
        for epoch in run.history:
            number = value(epoch)
            if number is not None:
                columns[epoch.epoch].append(number)
    complete = sorted((epoch, found) for epoch, found in columns.items() if len(found) == len(setting.runs))
    return [_point(epoch, found) for epoch, found in complete]


def _point(x: float, values: list[float]) -> dict[str, float | None]:
    return {"x": x, "y": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def _with_count(setting: Setting) -> str:
    return setting.label + (f" · {len(setting.runs)} seeds" if len(setting.runs) > 1 else "")


def _against_epsilon(settings: Sequence[Setting], styles: dict[str, Style], measure: Measure) -> Chart:
    """A line for each method over its budgets. Runs without privacy have no place on the axis: a level across."""
    lines: dict[str, list[Setting]] = defaultdict(list)
    for setting in settings:
        if setting.complete and setting.scores:
            lines[setting.line].append(setting)
    series: list[dict[str, Any]] = []
    for line, members in lines.items():
        style = styles[members[0].label]
        private = [m for m in members if m.epsilon is not None]
        points = [_point(m.epsilon or 0.0, [measure.shown(s) for s in m.scores]) for m in private]
        if points:
            series.append({"label": line, **style, "points": sorted(points, key=lambda p: p["x"] or 0), "dots": True})
        for member in members:
            if member.epsilon is None:
                level = _point(0.0, [measure.shown(s) for s in member.scores])
                series.append({"label": f"{member.label} (ε = ∞)", **style, "points": [level], "level": True})
    spent = [p["x"] for s in series if not s.get("level") for p in s["points"]]
    far_apart = bool(spent) and min(spent) > 0 and max(spent) / min(spent) > 4
    axis = {**EPSILON, "scale": "log" if far_apart else "linear"}
    return {
        "kind": "lines",
        "title": f"{measure.name.capitalize()} against ε",
        "x": axis,
        "y": SCORES[measure.name],
        "series": series if spent and len(series) + len(spent) > 2 else [],  # a lone point compares nothing
    }


def _epsilon_over_epochs(settings: Sequence[Setting], styles: dict[str, Style]) -> Chart:
    """One line for all settings that spend alike, as methods at one budget do."""
    alike: dict[tuple[tuple[int, float], ...], list[Setting]] = defaultdict(list)
    for setting in settings:
        points = _mean_over_epochs(setting, lambda epoch: epoch.epsilon)
        if points:
            alike[tuple((int(p["x"] or 0), round(p["y"] or 0.0, 4)) for p in points)].append(setting)
    series = []
    for curve, members in alike.items():
        label = members[0].label if len(members) == 1 else f"{_budget_text(members[0])} · {len(members)} settings"
        points = [{"x": x, "y": y, "std": None} for x, y in ((0, 0.0), *curve)]
        series.append({"label": label, **styles[members[0].label], "points": points})
    axis = {**EPSILON, "scale": "from zero"}
    return {"kind": "lines", "title": "ε spent over epochs", "x": EPOCH, "y": axis, "series": series}


def _budget_text(setting: Setting) -> str:
    """Such as "ε = 3.3"."""
    names = {"epsilon": "ε", "noise_multiplier": "noise multiplier"}
    return ", ".join(f"{names[key]} = {as_text(setting.config[key])}" for key in BUDGET if key in setting.config)


# --- rank × sparsity --------------------------------------------------------------------------------------------------


def _heat_maps(settings: Sequence[Setting], measure: Measure) -> list[Chart]:
    """One for each budget (and whatever else differs) that has at least two ranks and two sparsities."""
    placed = [(setting, place) for setting in settings if (place := _place(setting))]
    groups: dict[str, dict[tuple[Any, float], Setting]] = defaultdict(dict)
    for loosely in (True, False):
        groups.clear()
        clash = False
        for setting, place in placed:
            cells = groups[_rest(setting, loosely)]
            clash |= place in cells
            cells[place] = setting
        if not clash:
            break
    charts = []
    for cells in groups.values():
        ranks = sorted({rank for rank, _ in cells}, key=lambda rank: float("inf") if rank == _FULL else rank)
        sparsities = sorted({sparsity for _, sparsity in cells})
        if len(ranks) > 1 and len(sparsities) > 1 and len(cells) > 3:
            charts.append(_heat_map(cells, ranks, sparsities, measure))
    return charts


def _place(setting: Setting) -> tuple[Any, float] | None:
    """(rank, sparsity) in the paper's grid: RGP is p = 0, full rank is (Sparse) DPSGD. None: not in the grid."""
    config, method = setting.config, setting.config.get("method")
    if method not in PRIVATE_METHODS or config.get("importance", "weight") != "weight":
        return None
    rank, sparsity = config.get("rank", _FULL), config.get("sparsity", 0.0)
    numbers = isinstance(sparsity, int | float) and (rank == _FULL or isinstance(rank, int))
    return (rank, float(sparsity)) if numbers and setting.complete and setting.scores else None


def _rest(setting: Setting, loosely: bool) -> str:
    """Everything but the place in the grid and, loosely, what is tuned for each method."""
    left_out = ("method", "rank", "sparsity", "importance", *(_TUNED if loosely else ()))
    return str(sorted((key, str(value)) for key, value in setting.config.items() if key not in left_out))


def _heat_map(
    cells: dict[tuple[Any, float], Setting], ranks: list[Any], sparsities: list[float], measure: Measure
) -> Chart:
    rows = []
    for sparsity in sparsities:
        found = [cells.get((rank, sparsity)) for rank in ranks]
        rows.append(
            [
                None if s is None else {**_point(0, [measure.shown(x) for x in s.scores]), "label": s.label}
                for s in found
            ]
        )
    return {
        "kind": "heat",
        "title": f"{measure.name.capitalize()} by rank and sparsity, {_budget_text(next(iter(cells.values())))}",
        "x": {"label": "rank r"},
        "y": {"label": "sparsity p"},
        "columns": [str(rank) for rank in ranks],
        "rows": [f"{sparsity:g}" for sparsity in sparsities],
        "cells": rows,
    }
