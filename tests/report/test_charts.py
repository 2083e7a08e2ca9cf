"""The page's data: which runs are one setting, their mean and deviation, and what is drawn of them."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from lsg.report import find_runs
from lsg.report.charts import COLOURS, DASHES, make_charts
from lsg.report.settings import Section, make_sections
from tests.report.run_folders import write_grid, write_run


def _chart(section: Section, title: str) -> dict[str, Any]:
    return next(chart for chart in make_charts(section) if chart["title"].startswith(title))


def test_runs_that_differ_only_by_seed_are_one_setting(tmp_path: Path) -> None:
    for seed, score in enumerate((0.8, 0.9, 0.7)):
        write_run(tmp_path / f"seed{seed}", seed=seed, score=score)
    write_run(tmp_path / "other", lr=0.01)
    write_run(tmp_path / "late", complete=False)
    runs = find_runs([tmp_path])
    (section,) = make_sections(runs)
    assert [(s.label, len(s.runs)) for s in section.settings] == [
        ("lsg r=8 p=0.5, lr=0.001 (incomplete)", 1),
        ("lsg r=8 p=0.5, lr=0.01", 1),
        ("lsg r=8 p=0.5, lr=0.001", 3),
    ]
    setting = section.settings[2]
    scores = [run.score for run in runs if run.name.startswith("seed")]
    assert setting.mean == statistics.fmean(scores) and setting.std == statistics.stdev(scores)
    assert section.settings[1].std is None


def test_what_a_method_does_not_use_does_not_part_its_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", method="dpsgd", rank=8, seed=0)
    write_run(tmp_path / "b", method="dpsgd", rank=4, sparsity=0.1, seed=1)
    (section,) = make_sections(find_runs([tmp_path]))
    assert [(s.label, len(s.runs)) for s in section.settings] == [("dpsgd", 2)]


def test_curves_are_means_at_the_epochs_that_all_seeds_have(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"seed{seed}", seed=seed, complete=False, score=0.8 + 0.1 * seed)
    short = tmp_path / "seed1" / "metrics.jsonl"
    short.write_text("".join(short.read_text().splitlines(keepends=True)[:2]))
    runs = find_runs([tmp_path])
    (section,) = make_sections(runs)
    (series,) = _chart(section, "Accuracy over epochs")["series"]
    assert [point["x"] for point in series["points"]] == [1, 2]
    values = [100 * run.history[0].score for run in runs]
    assert series["points"][0]["y"] == pytest.approx(statistics.fmean(values))
    assert series["points"][0]["std"] == pytest.approx(statistics.stdev(values))
    assert "(incomplete)" in series["label"]


def test_loss_is_marked_as_not_private(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (section,) = make_sections(find_runs([tmp_path]))
    chart = _chart(section, "Training loss")
    assert "not private" in chart["title"] and "not private" in chart["y"]["label"]


def test_signal_and_noise_are_two_lines_marked_as_not_private(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"seed{seed}", seed=seed)
    write_run(tmp_path / "plain", method="non-private", epsilon=None)
    (section,) = make_sections(find_runs([tmp_path]))
    chart = _chart(section, "Signal against noise")
    assert "not private" in chart["title"] and "not private" in chart["y"]["label"] and chart["y"]["scale"] == "log"
    signal, noise = chart["series"]
    assert signal["label"].endswith(": signal") and noise["label"].endswith(": noise")
    assert signal["colour"] == noise["colour"] and signal["dash"] != noise["dash"]
    assert [p["y"] for p in signal["points"]] == pytest.approx([0.02 / epoch for epoch in range(1, 7)])
    assert {p["y"] for p in noise["points"]} == {0.3}
    clipped = _chart(section, "Gradients clipped")
    assert "not private" in clipped["title"] and len(clipped["series"]) == 1


def test_a_signal_of_zero_has_no_place_on_a_logarithmic_axis(tmp_path: Path) -> None:
    for seed, last in enumerate((0.0, 1.0)):
        run = write_run(tmp_path / f"seed{seed}", seed=seed, complete=False)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows[0]["signal_norm"], rows[1]["signal_norm"] = 0.0, last
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (section,) = make_sections(find_runs([tmp_path]))
    signal = _chart(section, "Signal against noise")["series"][0]
    assert [p["x"] for p in signal["points"]] == [2, 3]
    assert signal["points"][0] == {"x": 2, "y": 0.5, "std": None}  # a band would reach below zero


def test_runs_of_older_versions_have_no_signals(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    result = json.loads((run / "result.json").read_text())
    del result["warnings"]
    for row in result["history"]:
        del row["clip_share"], row["signal_norm"], row["noise_norm"]
    (run / "result.json").write_text(json.dumps(result))
    (found,) = find_runs([tmp_path])
    assert found.warnings == ()
    titles = [chart["title"] for chart in make_charts(make_sections([found])[0])]
    assert titles and not any("Signal" in title or "clipped" in title for title in titles)


def test_a_grid_has_every_chart(tmp_path: Path) -> None:
    cifar, sst2 = make_sections(find_runs([write_grid(tmp_path)]))
    assert (cifar.title, sst2.title) == ("cifar10 · wrn28-2", "sst2 · mpnet-base")
    against = _chart(sst2, "Accuracy against")
    lsg = next(series for series in against["series"] if series["label"] == "lsg r=8 p=0.5")
    assert [point["x"] for point in lsg["points"]] == [0.8, 1.2, 3.3, 6.5] and against["x"]["scale"] == "log"
    level = next(series for series in against["series"] if series.get("level"))
    assert level["label"] == "non-private (ε = ∞)" and level["colour"] == "reference"
    spending = _chart(sst2, "ε spent")["series"]
    assert spending[0]["label"] == "ε = 3.3 · 9 settings"
    assert all(series["points"][0] == {"x": 0, "y": 0.0, "std": None} for series in spending)
    assert not any(chart["title"].startswith("Accuracy against") for chart in make_charts(cifar))  # one point


def test_the_heat_map_places_rgp_at_no_sparsity(tmp_path: Path) -> None:
    (_, sst2) = make_sections(find_runs([write_grid(tmp_path)]))
    maps = [chart for chart in make_charts(sst2) if chart["kind"] == "heat"]
    assert [chart["title"] for chart in maps] == ["Accuracy by rank and sparsity, ε = 3.3"]
    assert maps[0]["columns"] == ["2", "4", "8"] and maps[0]["rows"] == ["0", "0.3", "0.5"]
    assert maps[0]["cells"][0][0]["label"] == "rgp r=2, ε=3.3"


def test_rates_tuned_for_each_method_share_a_heat_map_unless_cells_clash(tmp_path: Path) -> None:
    for rank in (2, 4):
        write_run(tmp_path / f"lsg{rank}", rank=rank, lr=0.001)
        write_run(tmp_path / f"rgp{rank}", rank=rank, lr=0.002, method="rgp")
    write_run(tmp_path / "full", lr=0.003, method="dpsgd")
    (section,) = make_sections(find_runs([tmp_path]))
    (heat,) = [chart for chart in make_charts(section) if chart["kind"] == "heat"]
    assert heat["columns"] == ["2", "4", "full"] and heat["cells"][1][2] is None
    write_run(tmp_path / "clash", rank=2, lr=0.004)
    (section,) = make_sections(find_runs([tmp_path]))
    assert not [chart for chart in make_charts(section) if chart["kind"] == "heat"]


def test_series_of_one_colour_have_different_dashes(tmp_path: Path) -> None:
    (_, sst2) = make_sections(find_runs([write_grid(tmp_path)]))
    styles = [(s["colour"], s["dash"]) for s in _chart(sst2, "Accuracy over")["series"]]
    assert len(set(styles)) == len(styles) <= COLOURS * DASHES
