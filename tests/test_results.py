"""What is published under results/: few files, each run with where it comes from, tables that follow from the runs."""

import json
from pathlib import Path

import pytest

from lsg.audit.exposure import BY_CHANCE
from lsg.reproduce.records import read_records
from lsg.reproduce.scales import scale
from lsg.reproduce.store import Store
from lsg.reproduce.studies import studies
from tests.reproduce.test_studies import some_measure

RESULTS = Path(__file__).parents[1] / "results"
DATA = {"text": "assets/sst2", "image": "assets/cifar-10-batches-bin"}
MODELS = {"text": "assets/all-mpnet-base-v2"}
SCALES = {"cpu-minutes": (scale("cpu-minutes"), 2), "gpu-hour": (scale("gpu-hour").using(DATA, MODELS), 3)}  # seeds
RUNS = sorted((RESULTS / "reproduce").glob("*/*.jsonl"))


def test_results_are_few_files_without_twins_or_weights() -> None:
    files = [file for file in RESULTS.rglob("*") if file.is_file()]
    assert len(files) <= 80
    assert {file.suffix for file in files} <= {".md", ".json", ".jsonl", ".csv", ".txt", ".png"}
    assert sum(file.stat().st_size for file in files) < 4_000_000


@pytest.mark.parametrize("file", RUNS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_run_says_where_it_comes_from(file: Path) -> None:
    for name, record in read_records(file).items():
        assert isinstance(record["config"]["seed"], int), name
        if record.get("stopped"):  # before its end, when provenance is written
            assert record["history"], name
            continue
        origin = record["provenance"]
        assert origin["command"] and origin["commit"], name
        assert origin["versions"]["torch"] and origin["hardware"]["cpu"], name


@pytest.mark.parametrize("name", ["kills.json", "units.json"])
def test_the_stored_kills_are_two_hundred_of_committed_code(name: str) -> None:
    found = json.loads((RESULTS / "kills" / name).read_text())
    assert found["kills"] >= 200 and not found["provenance"]["modified"]
    assert ("unit_of" in found.get("options", {})) == (name == "units.json")


def test_the_stored_kills_of_ranks_are_thirty_with_and_without_restart() -> None:
    found = json.loads((RESULTS / "kills" / "ranks.json").read_text())
    for how in ("elastic", "resumed"):
        assert found[how]["kills"] >= 30 and found[how]["longest_wait_seconds"] < found["allowed_wait_seconds"] == 30
    assert found["ranks"] == 3 and not found["provenance"]["modified"]


@pytest.mark.parametrize("name", ["bar.json", "units.json"])
def test_the_stored_audits_flag_all_that_is_broken_and_nothing_else(name: str) -> None:
    found = json.loads((RESULTS / "audit" / name).read_text())
    summary = found["summary"]
    assert summary["intact_consistent"] == summary["intact_in_all"] and summary["largest_ratio"] <= 1
    assert summary["broken_flagged"] == summary["broken_in_all"] and not found["provenance"]["modified"]
    units = {"records": 3, "views": 2} if name == "units.json" else {}
    assert {key: found["plan"][key] for key in ("records", "views") if key in found["plan"]} == units


@pytest.mark.parametrize("name", SCALES)
def test_the_tables_follow_from_the_runs(name: str, tmp_path: Path) -> None:
    chosen, seeds = SCALES[name]
    folder = RESULTS / "reproduce" / name
    store = Store(folder / "cells")
    found = studies(chosen, some_measure)
    del found["figure-weights"]  # from a trained model, which is not kept
    for study in found.values():
        study.render(lambda config: store.summary(config, range(seeds)), tmp_path)
    tables = [*tmp_path.glob("*.md"), *tmp_path.glob("*.csv")]
    assert len(tables) == 9
    for table in tables:
        assert table.read_text() == (folder / table.name).read_text(), table.name


def test_the_stored_language_models_expose_secrets_without_privacy_alone() -> None:
    rows = [json.loads(line) for line in (RESULTS / "emails" / "cells.jsonl").read_text().splitlines()]
    cells = {tuple(row["cell"][key] for key in ("method", "unit", "epsilon")) for row in rows if "exposures" in row}
    for method in ("lsg", "rgp", "lora"):
        assert {(method, unit, epsilon) for unit in ("message", "sender") for epsilon in (1.0, 3.0, 8.0)} <= cells
    for row in rows:
        assert not row["provenance"]["modified"]
        if "exposures" in row:
            above = (row["mean_exposure_bits"] - BY_CHANCE) / row["standard_error"]
            assert above > 4 if row["cell"]["method"] == "non-private" else above < 2, row["cell"]
