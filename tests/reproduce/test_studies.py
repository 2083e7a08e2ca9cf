"""The studies of each scale: which cells, what they share, the right numbers in the right places."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lsg.errors import ConfigurationError
from lsg.reproduce.grid import run_cells, with_seeds
from lsg.reproduce.intensity import Intensity
from lsg.reproduce.scales import SCALES, scale
from lsg.reproduce.store import Store, Summary, cell_name
from lsg.reproduce.studies import Study, studies
from lsg.train.config import RunConfig
from tests.support.fake_run import FakeRun, score_of

NAMES = ["figure-weights", "figure-epsilon", "table1", "table2", "figure-convergence", "negatives"]


def no_measure(config: RunConfig, trained: bool) -> Intensity:
    raise AssertionError


def some_measure(config: RunConfig, trained: bool) -> Intensity:
    values = np.random.default_rng(0).random((30, 20))
    return Intensity("fc1.weight", values, values**4)


def names(study: Study) -> set[str]:
    return {cell_name(config) for config in study.configs}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", SCALES)
def test_every_scale_has_every_study_and_no_two_cells_of_one_name(name: str) -> None:
    found = studies(scale(name), no_measure)
    assert list(found) == NAMES
    cells = with_seeds((config for study in found.values() for config in study.configs), scale(name).seeds)
    assert len({cell_name(cell) for cell in cells}) == len(cells)


def test_the_papers_scale_has_the_papers_settings() -> None:
    found = studies(scale("paper"), no_measure)
    assert len(names(found["table1"])) == 2 * 16
    assert len(names(found["table2"])) == 4 * 4 + 1
    assert len(names(found["figure-epsilon"])) == 4 * (4 * 4 + 1)
    assert len(names(found["figure-convergence"])) == 16
    assert scale("paper").seeds == 5
    by_name = {cell_name(config): config for study in found.values() for config in study.configs}
    sst2, mnli = by_name["sst2-lsg-r8-p0.5-eps3.3-seed0"], by_name["mnli-rgp-r8-eps6.7-seed0"]
    assert (sst2.model, sst2.optimizer, sst2.lr, sst2.max_grad_norm) == ("roberta-base", "adam", 1e-3, 10)
    assert (sst2.batch_size, sst2.epochs, sst2.delta, mnli.delta) == (2000, 20, 1e-5, 1e-6)
    lsg, dpsgd = by_name["cifar10-lsg-r16-p0.3-eps0.8-seed0"], by_name["cifar10-dpsgd-eps0.8-seed0"]
    assert (lsg.max_grad_norm, lsg.batch_size, lsg.epochs, lsg.lr) == (1, 1000, 200, 0.5)
    assert (dpsgd.max_grad_norm, dpsgd.batch_size, dpsgd.epochs, dpsgd.lr) == (5, 350, 100, 0.5)
    assert (lsg.optimizer, lsg.lr_schedule, lsg.delta) == ("sgd", "steps", 1e-5)


def test_studies_share_cells() -> None:
    found = studies(scale("paper"), no_measure)
    shared = {"sst2-lsg-r8-p0.5-eps3.3-seed0", "sst2-rgp-r8-eps3.3-seed0", "sst2-sparse-dpsgd-p0.5-eps3.3-seed0"}
    assert shared <= names(found["table1"]) & names(found["figure-epsilon"]) & names(found["negatives"])
    small = studies(scale("cpu-minutes"), no_measure)
    every = [config for study in small.values() for config in study.configs]
    assert len(every) == 1 + 17 + 16 + 17 + 12 + 7 and len(set(every)) == 33


def test_data_and_models_are_replaced_by_task_or_kind() -> None:
    changed = scale("paper").using({"sst2": "/glue/SST-2"}, {"text": "/mpnet", "qqp": "/minilm", "cifar10": "wrn28-2"})
    sst2, qqp = changed.table1
    assert (sst2.data, sst2.model, qqp.data, qqp.model) == ("/glue/SST-2", "/mpnet", None, "/minilm")
    assert changed.image.model == "wrn28-2" and changed.image.title == "CIFAR-10, wrn28-2"
    assert replace(sst2, model="/runs/mine/model").title == "SST-2, mine/model"
    assert {workload.model for workload in changed.epsilon} == {"/mpnet", "/minilm"}
    with pytest.raises(ConfigurationError, match=r"--model digits=x: scale 'paper' has cifar10, image, mnli"):
        scale("paper").using({}, {"digits": "x"})
    with pytest.raises(ConfigurationError, match="--scale 'big' must be one of paper, gpu-hour, cpu-minutes"):
        scale("big")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything at the smallest scale, from a fake run, with one cell missing."""
    folder = tmp_path_factory.mktemp("studies")
    store = Store(folder / "cells")
    found = studies(scale("cpu-minutes"), some_measure)
    cells = with_seeds((config for study in found.values() for config in study.configs), seeds=2)
    left_out = {"digits-sparse-dpsgd-p0.3-eps3.3-seed0", "digits-sparse-dpsgd-p0.3-eps3.3-seed1"}
    run_cells([cell for cell in cells if cell_name(cell) not in left_out], store, FakeRun())
    for study in found.values():
        for path in study.render(lambda config: store.summary(config, range(2)), folder):
            assert path.is_file()
    return folder


def test_table1_has_each_number_in_its_place(rendered: Path) -> None:
    page = (rendered / "table1.md").read_text()
    assert "digits, small-cnn (stand-in for SST-2), ε = 3.3" in page
    lines = [line for line in page.splitlines() if line.startswith("| p=")]
    assert [line.split(" | ")[0] for line in lines] == ["| p=0", "| p=0.1", "| p=0.3", "| p=0.5"]
    places = lines[3].strip("| ").split(" | ")
    lsg = scale("cpu-minutes").table1[0].config("lsg")
    mean = 100 * (score_of(lsg) + score_of(replace(lsg, seed=1))) / 2
    assert places[5:7] == [f"{mean:.1f} ± 1.4 (n=2)", "90.4"]  # seeds differ by 2 points in the fake
    assert lines[2].strip("| ").split(" | ")[7:] == ["-", "80.5"]  # left out
    dpsgd = next(row for row in rows(rendered / "table1.csv") if row["method"] == "dpsgd")
    assert dpsgd["paper_accuracy"] == "81.0" and float(dpsgd["accuracy_mean"]) == pytest.approx(51.8)


def test_table2_has_each_number_in_its_place(rendered: Path) -> None:
    page = (rendered / "table2.md").read_text()
    assert "stand-in for CIFAR-10" in page
    line = next(line for line in page.splitlines() if line.startswith("| LSG"))
    assert [place for place in line.strip("| ").split(" | ")[2::2]] == ["42.2", "50.9", "58.1", "62.5"]
    assert "93.3" in next(line for line in page.splitlines() if line.startswith("| N.P."))


def test_negatives_stand_beside_lsg_and_rgp(rendered: Path) -> None:
    found = rows(rendered / "negatives.csv")
    assert [(row["method"], row["importance"]) for row in found] == [
        ("lsg", "weight"),
        ("rgp", ""),
        ("sparse-dpsgd", "weight"),
        ("lsg", "random"),
        ("sparse-dpsgd", "random"),
        ("lsg", "factor"),
        ("lsg", "direct"),
    ]
    assert [row["paper_accuracy"] for row in found] == ["90.4", "88.3", "80.3", "", "", "", ""]
    assert all(row["seeds"] == "2" for row in found)


def test_figures_are_there_in_both_formats(rendered: Path) -> None:
    for name in ("figure-weights", "figure-epsilon", "figure-convergence", "table1-heat-map"):
        assert (rendered / f"{name}.png").stat().st_size > 10_000
        assert "<svg" in (rendered / f"{name}.svg").read_text()
    assert "stand-in" in (rendered / "figure-weights.svg").read_text()
    epochs = [row["epoch"] for row in rows(rendered / "figure-convergence.csv")]
    assert len(epochs) == 12 * 3 and set(epochs) == {"1", "2", "3"}


@pytest.mark.parametrize("name", SCALES)
def test_with_nothing_run_all_places_are_dashes(name: str, tmp_path: Path) -> None:
    nothing: Callable[[RunConfig], Summary | None] = lambda config: None  # noqa: E731
    for study in studies(scale(name), some_measure).values():
        study.render(nothing, tmp_path)
    for row in rows(tmp_path / "table2.csv"):
        assert row["seeds"] == "0" and row["accuracy_mean"] == ""
    assert "not run" in (tmp_path / "figure-epsilon.svg").read_text()


def test_what_gpu_hour_takes_as_tuned_is_what_tuning_found() -> None:
    found = json.loads((Path(__file__).parents[2] / "results" / "reproduce" / "gpu-hour" / "tuned.json").read_text())
    assert scale("gpu-hour").negatives.tuned == found
