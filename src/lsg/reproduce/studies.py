"""The paper's tables and figures as studies: which cells each needs, and how it is rendered once they are there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lsg.files.atomic import write_atomic
from lsg.methods import METHODS, PRIVATE_METHODS
from lsg.report.figures import COLOURS
from lsg.reproduce.intensity import Intensity
from lsg.reproduce.paper_results import TABLE1, TABLE2, TABLE2_NON_PRIVATE
from lsg.reproduce.plots import save_curves_figure, save_epsilon_figure, save_heat_map, save_intensity_figure
from lsg.reproduce.scales import Scale
from lsg.reproduce.store import Summary
from lsg.reproduce.tables import Entry, Panel, comma_separated, curves_comma_separated, markdown
from lsg.reproduce.workload import TITLES, Workload
from lsg.train.config import RunConfig

Summaries = Callable[[RunConfig], Summary | None]  # a cell, whatever its seed -> our result over the seeds
Measure = Callable[[RunConfig, bool], Intensity]  # a cell, whether to take its trained model -> one layer's figures

METHOD_TITLES = {name: METHODS[name].title for name in PRIVATE_METHODS}
METHOD_COLOURS = dict(zip(METHOD_TITLES.values(), COLOURS, strict=False))
OURS = "Ours: percent after the last epoch, mean ± standard deviation over n seeds. `-`: not run, or not in the paper."


@dataclass(frozen=True)
class Study:
    """configs: the cells, seed 0. models: those whose trained weights the rendering needs.

    render: (our results, folder) -> the files written there.
    """

    name: str
    title: str
    configs: tuple[RunConfig, ...]
    render: Callable[[Summaries, Path], list[Path]]
    models: tuple[RunConfig, ...] = ()


def studies(scale: Scale, measure: Measure) -> dict[str, Study]:
    """All of them, in the paper's order. measure: used by figure-weights alone."""
    found = (
        _figure_weights(scale, measure),
        _figure_epsilon(scale),
        _table1(scale),
        _table2(scale),
        _figure_convergence(scale),
        _negatives(scale),
    )
    return {study.name: study for study in found}


def _figure_weights(scale: Scale, measure: Measure) -> Study:
    config = scale.weights.config("non-private")
    trained = scale.weights_trained
    title = "Weights and gradients of one layer"

    def render(summaries: Summaries, folder: Path) -> list[Path]:
        if trained and summaries(config) is None:
            return []
        state = "after non-private training" if trained else "pretrained"
        return save_intensity_figure(
            folder / "figure-weights", f"{scale.weights.title}, {state}", measure(config, trained)
        )

    cells = (config,) if trained else ()
    return Study("figure-weights", title, cells, render, models=cells)


def _figure_epsilon(scale: Scale) -> Study:
    title = "Accuracy against ε"

    def cells(workload: Workload, method: str) -> dict[float, RunConfig]:
        return {epsilon: workload.config(method, epsilon=epsilon) for epsilon in workload.epsilons}

    def render(summaries: Summaries, folder: Path) -> list[Path]:
        tables, points, references = [], {}, {}
        for workload in scale.epsilon:
            grid = {label: cells(workload, method) for method, label in METHOD_TITLES.items()}
            ours = {label: {e: summaries(c) for e, c in row.items()} for label, row in grid.items()}
            points[workload.title] = {
                label: {epsilon: summary for epsilon, summary in row.items() if summary is not None}
                for label, row in ours.items()
                if any(row.values())
            }
            references[workload.title] = summaries(workload.config("non-private"))
            tables.append(_by_epsilon(workload, summaries, _figure_epsilon_in_paper))
        pictures = save_epsilon_figure(folder / "figure-epsilon", points, references, METHOD_COLOURS)
        notes = [OURS, "The paper gives numbers at one ε alone, in its table 1."]
        return [*pictures, *_write(folder / "figure-epsilon", title, tables, notes)]

    configs = [c for w in scale.epsilon for method in PRIVATE_METHODS for c in cells(w, method).values()]
    configs += [w.config("non-private") for w in scale.epsilon]
    return Study("figure-epsilon", title, tuple(configs), render)


def _figure_epsilon_in_paper(workload: Workload, config: RunConfig) -> float | None:
    if config.epsilon != workload.epsilon:
        return None
    rank = config.rank if "rank" in METHODS[config.method].options else None
    return TABLE1.get(workload.stands_for, {}).get((rank, config.sparsity))


def _table1(scale: Scale) -> Study:
    title = "Table 1: rank and sparsity"

    def render(summaries: Summaries, folder: Path) -> list[Path]:
        panels = []
        for workload in scale.table1:
            rows = {
                f"p={sparsity:g}": [
                    Entry(
                        config := workload.at(rank, sparsity),
                        summaries(config),
                        TABLE1[workload.stands_for].get((rank, sparsity)),
                    )
                    for rank in scale.ranks
                ]
                for sparsity in scale.sparsities
            }
            columns = tuple("full" if rank is None else f"r={rank}" for rank in scale.ranks)
            panels.append(Panel(f"{workload.title}, ε = {workload.epsilon:g}", "sparsity", columns, rows))
        notes = [OURS, "Row p=0 is RGP, column full is Sparse DPSGD, both together DPSGD; the rest is LSG."]
        notes += [f"The paper's: {TITLES[w.stands_for]}, RoBERTa-base, mean of 5 seeds." for w in scale.table1]
        return [*_write(folder / "table1", title, panels, notes), *save_heat_map(folder / "table1-heat-map", panels)]

    configs = [w.at(rank, sparsity) for w in scale.table1 for sparsity in scale.sparsities for rank in scale.ranks]
    return Study("table1", title, tuple(configs), render)


def _table2(scale: Scale) -> Study:
    title, workload = "Table 2: training from scratch", scale.image

    def in_paper(workload: Workload, config: RunConfig) -> float | None:
        if config.epsilon is None:
            return TABLE2_NON_PRIVATE
        return TABLE2[config.method].get(config.epsilon)

    def render(summaries: Summaries, folder: Path) -> list[Path]:
        notes = [
            OURS,
            "The paper's: CIFAR-10, a wide ResNet (docs/errata.md says which), mean of 5 seeds; N.P. from RGP's paper.",
            f"It does not say which rank and sparsity: ours are r={workload.rank}, p={workload.sparsity:g}.",
        ]
        return _write(folder / "table2", title, [_by_epsilon(workload, summaries, in_paper)], notes)

    configs = [workload.config(method, epsilon=epsilon) for epsilon in workload.epsilons for method in PRIVATE_METHODS]
    return Study("table2", title, (*configs, workload.config("non-private")), render)


def _figure_convergence(scale: Scale) -> Study:
    title, workload = "Learning curves for rank and sparsity", scale.image
    places = [(rank, sparsity) for rank in scale.curve_ranks for sparsity in scale.curve_sparsities]

    def render(summaries: Summaries, folder: Path) -> list[Path]:
        found = {place: summaries(workload.at(*place)) for place in places}
        curves = {place: summary for place, summary in found.items() if summary is not None}
        file = folder / "figure-convergence.csv"
        rows = [(workload.at(*place), summary) for place, summary in curves.items()]
        write_atomic(file, curves_comma_separated(rows))
        heading = f"{workload.title}, ε = {workload.epsilon:g}"
        return [*save_curves_figure(folder / "figure-convergence", heading, curves), file]

    return Study("figure-convergence", title, tuple(workload.at(*place) for place in places), render)


def _negatives(scale: Scale) -> Study:
    title, workload = "What did not work in the paper", scale.negatives
    variants = {
        "LSG: masks from the weights": workload.config("lsg"),
        "RGP: no masks": workload.config("rgp"),
        "Sparse DPSGD: masks from the weights, full gradient": workload.config("sparse-dpsgd"),
        "random masks on the factors": workload.config("lsg", importance="random"),
        "random masks on the full gradient": workload.config("sparse-dpsgd", importance="random"),
        "masks from the factors' own weights": workload.config("lsg", importance="factor"),
        "∂W masked after lifting": workload.config("lsg", importance="direct"),
    }

    def render(summaries: Summaries, folder: Path) -> list[Path]:
        rows = {}
        for label, config in variants.items():
            known = config.importance == "weight"
            rows[label] = [
                Entry(config, summaries(config), _figure_epsilon_in_paper(workload, config) if known else None)
            ]
        notes = [OURS, "Of the last four rows the paper says only that they did not improve on it (section 4.4)."]
        panel = Panel(f"{workload.title}, ε = {workload.epsilon:g}", "variant", ("accuracy",), rows)
        return _write(folder / "negatives", title, [panel], notes)

    return Study("negatives", title, tuple(variants.values()), render)


def _by_epsilon(
    workload: Workload, summaries: Summaries, in_paper: Callable[[Workload, RunConfig], float | None]
) -> Panel:
    """Methods x epsilons; the non-private row has the same entry throughout."""

    def entry(config: RunConfig) -> Entry:
        return Entry(config, summaries(config), in_paper(workload, config))

    rows = {
        label: [entry(workload.config(method, epsilon=epsilon)) for epsilon in workload.epsilons]
        for method, label in METHOD_TITLES.items()
    }
    rows[METHODS["non-private"].title] = [entry(workload.config("non-private"))] * len(workload.epsilons)
    return Panel(workload.title, "method", tuple(f"ε={epsilon:g}" for epsilon in workload.epsilons), rows)


def _write(stem: Path, title: str, panels: list[Panel], notes: list[str]) -> list[Path]:
    page, data = stem.with_suffix(".md"), stem.with_suffix(".csv")
    write_atomic(page, markdown(title, panels, notes))
    write_atomic(data, comma_separated(panels))
    return [page, data]
