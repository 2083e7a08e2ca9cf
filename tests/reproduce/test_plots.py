"""Figures: a PNG and an SVG each, drawn from the numbers, also where some or all of them are missing."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from lsg.reproduce.intensity import Intensity
from lsg.reproduce.plots import save_curves_figure, save_epsilon_figure, save_heat_map, save_intensity_figure
from lsg.reproduce.store import Summary
from lsg.reproduce.tables import Entry, Panel
from lsg.train.config import RunConfig

CONFIG = RunConfig(task="digits", model="small-cnn", epsilon=3.0)
COLOURS = {"LSG": "#0072B2", "RGP": "#E69F00"}


def summary(mean: float) -> Summary:
    return Summary(2, mean, 0.5, (mean / 2, mean))


def check(paths: list[Path], *words: str) -> None:
    png, svg = paths
    assert (png.suffix, svg.suffix) == (".png", ".svg")
    pixels = matplotlib.image.imread(png)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 500 and pixels.std() > 0.02
    for word in words:  # text is drawn as shapes, named in comments
        assert word in svg.read_text()


def test_accuracy_against_epsilon(tmp_path: Path) -> None:
    points = {"LSG": {1.0: summary(80), 3.0: summary(90)}, "RGP": {3.0: summary(85)}}
    check(
        save_epsilon_figure(tmp_path / "a", {"SST-2": points}, {"SST-2": summary(95)}, COLOURS),
        *("SST-2", "LSG", "RGP", "N.P.", "#0072b2"),
    )
    three = {"one": points, "two": {}, "three": points}
    check(save_epsilon_figure(tmp_path / "b", three, {}, COLOURS), "one", "two", "three", "not run")


def test_learning_curves(tmp_path: Path) -> None:
    curves = {(rank, p): summary(80 + rank + p) for rank in (2, 8) for p in (0.0, 0.5)}
    check(save_curves_figure(tmp_path / "c", "digits", curves), "r=2, p=0 (RGP)", "r=8, p=0.5")
    check(save_curves_figure(tmp_path / "d", "digits", {}), "not run")


@pytest.mark.parametrize("run", [True, False])
def test_rank_by_sparsity(tmp_path: Path, run: bool) -> None:
    rows = {
        f"p={p}": [Entry(CONFIG, summary(70 + r) if run and r else None, 80.0 + r) for r in range(3)] for p in (0, 1)
    }
    panel = Panel("SST-2, ε = 3.3", "sparsity", ("r=2", "r=8", "full"), rows)
    check(save_heat_map(tmp_path / "e", [panel]), *(("71.0", "72.0") if run else ("not run",)), "The paper", "82.0")


def test_weights_and_gradients(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((40, 30))
    check(save_intensity_figure(tmp_path / "f", "digits", Intensity("fc1", values, values**8)), "fc1", "|∂W|")
    flat = np.zeros((4, 4))
    check(save_intensity_figure(tmp_path / "g", "digits", Intensity("fc1", flat + 1, flat)))
