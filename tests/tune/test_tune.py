"""Searches on digits and tiny texts: what they leave, what they cost, and that a crash changes nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lsg.accounting.selection import gaussian_curve, largest, run_curve, selection_epsilon
from lsg.errors import ConfigurationError
from lsg.sampling.plan import SamplingPlan
from lsg.tasks.encoded import EncodedImages
from lsg.train.config import RunConfig
from lsg.train.config_file import read_settings
from lsg.train.listener import Listener
from lsg.train.prepare_data import prepare_data
from lsg.train.result import RunResult
from lsg.train.run import run
from lsg.tune.listener import Outcome, SearchListener
from lsg.tune.plan import make_plan
from lsg.tune.search import Plan, Search
from lsg.tune.tune import chosen_by, tune
from tests.support.threads import one_thread  # noqa: F401 - a fixture for all tests here
from tests.support.tiny import glue_sst2, tiny_bert

CPU = torch.device("cpu")
BASE = RunConfig(
    task="digits", model="small-cnn", epsilon=3.0, delta=1e-4, accountant="rdp", optimizer="sgd", lr=0.2,
    batch_size=479, epochs=2, max_physical_batch_size=512, device="cpu", seed=1,
)  # fmt: skip
ONE_RUN = 10  # a seed at which one run is drawn; the seed of BASE draws three
VARIED: dict[str, list[Any]] = {"lr": [0.1, 0.4], "clipping": ["flat", "automatic"]}
PAID = Search(BASE, VARIED, runs=3)


@pytest.fixture(scope="module")
def paid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("tune") / "paid"
    return folder, tune(PAID, folder)


def test_a_paid_search_releases_the_best_model_with_the_cost_of_all(paid: tuple[Path, Outcome]) -> None:
    folder, outcome = paid
    privacy = json.loads((folder / "privacy.json").read_text())
    assert 2.9 < privacy["epsilon"] <= 3.0 and privacy["delta"] == 1e-4
    assert privacy["search"]["epsilon_of_one_run"] < 2.5
    assert outcome.scores[outcome.best - 1] == max(outcome.scores) == privacy["search"]["score"]
    assert (folder / "model" / "model.safetensors").is_file()
    winner = read_settings(folder / "runs" / f"{outcome.best:03d}" / "config.toml")
    tuned = read_settings(folder / "tuned.toml")
    assert {name: tuned[name] for name in VARIED} == {name: winner[name] for name in VARIED}
    assert tuned["epsilon"] == 3.0 and "seed" not in tuned and "noise_multiplier" not in tuned
    RunConfig.from_dict(tuned, "tuned.toml")
    assert not list(folder.glob("runs/*/model")) and not list(folder.glob("runs/*/privacy.json"))
    assert "PAID" in (folder / "tuned.toml").read_text()


def test_epsilon_covers_records_trained_on_and_records_scored_on() -> None:
    """From the plan alone, the cost is computed again, of every run that it holds."""
    plan = make_plan(PAID, Listener())
    records = 1301
    curves = [
        run_curve(config.noise_multiplier or 0.0, *SamplingPlan(records, config.batch_size).accounted(config.epochs))
        for config in plan.runs
    ]
    assert plan.epsilon is not None
    for curve in (largest(curves), gaussian_curve(plan.score_noise)):
        assert selection_epsilon(curve, PAID.repeats, BASE.delta) <= plan.epsilon <= 3.0
    assert all(config.validation == 0.1 and config.epsilon is None for config in plan.runs)
    assert len({config.seed for config in plan.runs}) == len(plan.runs)


def test_a_paid_statement_does_not_tell_the_number_of_runs(paid: tuple[Path, Outcome], tmp_path: Path) -> None:
    """Given the number, the guarantee would be another: two searches that differ in it say the same."""
    folder, outcome = paid
    other = tune(Search(replace(BASE, seed=ONE_RUN), VARIED, runs=3), tmp_path / "other")
    assert len(other.scores) == 1 != len(outcome.scores)
    assert other.statement == outcome.statement
    told = [json.loads((place / "privacy.json").read_text()) for place in (folder, tmp_path / "other")]
    of_the_winner = {"noise_multiplier", "clipping", "clipping_meaning", "search"}
    assert {key for key in told[0] if told[0][key] != told[1][key]} <= of_the_winner
    assert told[0]["search"] | {"score": 0} == told[1]["search"] | {"score": 0}


class Crash(SearchListener):
    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def epoch(self, row: dict[str, Any]) -> None:
        self.seen += 1
        if self.seen == self.at:
            raise KeyboardInterrupt


class Count(SearchListener):
    epochs = 0

    def epoch(self, row: dict[str, Any]) -> None:
        self.epochs += 1


def test_a_search_that_crashed_ends_as_it_would_have(paid: tuple[Path, Outcome], tmp_path: Path) -> None:
    whole, outcome = paid
    folder = tmp_path / "crashed"
    with pytest.raises(KeyboardInterrupt):
        tune(PAID, folder, listener=Crash(at=3))  # in the second run
    assert not (folder / "model").exists() and not (folder / "tuned.toml").exists()  # nothing to release before the end
    assert not list(folder.glob("runs/*/privacy.json"))  # nor a statement that knows of no search
    with pytest.raises(ConfigurationError, match="holds a search already"):
        tune(PAID, folder)
    again = Count()
    assert tune(None, folder, resume=True, listener=again) == outcome
    assert again.epochs <= 2 * len(outcome.scores) - 2  # the first run is not repeated
    assert (folder / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    idle = Count()
    assert tune(None, folder, resume=True, listener=idle) == outcome and idle.epochs == 0


def result(score: float) -> RunResult:
    return RunResult(BASE, score, {}, None, 0.0, 0, [], 0.0, [], {}, {})


def test_the_score_of_a_paid_search_is_a_noisy_count() -> None:
    plan = Plan((), (), score_noise=2.0, scored=150)
    for right in range(150):  # sensitivity 1: with the same noise, one record moves the count by one
        with_it, without = (chosen_by(plan, BASE, result(count / 150)) for count in (right + 1, right))
        assert 150 * (with_it - without) == pytest.approx(1)
    noise = torch.tensor(
        [150 * chosen_by(plan, replace(BASE, seed=seed), result(0.5)) - 75 for seed in range(1000)], dtype=torch.float64
    )
    assert abs(float(noise.mean())) < 5 * 2 / 1000**0.5  # false alarm: 1 in a million
    assert 1.75 < float(noise.std()) < 2.25  # 5 standard errors of 2 / sqrt(2000)
    assert chosen_by(Plan((), ()), BASE, result(0.5)) == 0.5


def test_a_part_set_aside_is_searched_on_and_never_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "held-out"
    outcome = tune(Search(BASE, VARIED, runs=2, held_out=0.4, shrink=2), folder)
    tuned = read_settings(folder / "tuned.toml")
    assert tuned["tuning_part"] == 0.4 and tuned["epsilon"] == 3.0 and tuned["validation"] == 0.0
    assert "NOT PRIVATE for about 40 %" in outcome.cost and outcome.statement is None
    assert not (folder / "model").exists() and not (folder / "privacy.json").exists()
    assert not list(folder.glob("runs/*/model")) and not list(folder.glob("runs/*/privacy.json"))
    final = run(RunConfig.from_dict({**tuned, "seed": 1}, "tuned.toml"), tmp_path / "final")
    assert any("EPSILON DOES NOT COVER THE SEARCH" in caveat for caveat in final.privacy["caveats"])
    assert "all but about 40 %, set aside for tuning" in final.privacy["trained_part"]

    def images(config: RunConfig, *, inside: bool) -> list[set[bytes]]:
        data = prepare_data(config, CPU, Listener(), only_tuning_part=inside)
        parts = [data.train, *(part for name, part in data.evaluation.items() if name == "validation")]
        return [{image.numpy().tobytes() for image in part.pixels} for part in parts if isinstance(part, EncodedImages)]

    searched = RunConfig.from_dict(read_settings(folder / "runs" / "001" / "config.toml"), "run")
    trained, scored = images(searched, inside=True)
    (released,) = images(final.config, inside=False)
    assert not trained & scored and not (trained | scored) & released
    assert len(trained) + len(scored) + len(released) >= 1430  # a few images are alike


def test_public_data_stand_in_for_private_ones(tmp_path: Path) -> None:
    private, public = glue_sst2(tmp_path / "private", train=96), glue_sst2(tmp_path / "public", train=48)
    base = RunConfig(
        task="sst2", data=str(private), model=str(tiny_bert(tmp_path / "bert")), epsilon=3.0, delta=1e-3,
        accountant="rdp", batch_size=24, epochs=2, max_length=32, rank=2, device="cpu", seed=3,
    )  # fmt: skip
    search = Search(base, {"lr": [1e-3, 1e-2]}, runs=5, public_data=str(public))
    outcome = tune(search, tmp_path / "tuned")
    assert len(outcome.scores) == 2  # no more than there are candidates
    assert outcome.tried[0] == "lr 0.001"  # the base comes first
    assert "FREE" in outcome.cost
    tuned = read_settings(tmp_path / "tuned" / "tuned.toml")
    assert tuned["data"] == str(private) and tuned["batch_size"] == 24
    searched = read_settings(tmp_path / "tuned" / "runs" / "001" / "config.toml")
    assert searched["data"] == str(public) and searched["epochs"] == 4  # half the records, as many steps
    full = run(RunConfig.from_dict({**tuned, "seed": 1}, "tuned.toml"), tmp_path / "final")
    assert searched["noise_multiplier"] / searched["batch_size"] == pytest.approx(full.noise_multiplier / 24, rel=0.02)


def test_what_is_too_large_for_the_data_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--batch-size 5000 is more than"):
        tune(Search(BASE, {"batch_size": [100, 5000]}), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigurationError, match="holds no search to go on with"):
        tune(None, tmp_path / "a", resume=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").touch()
    with pytest.raises(ConfigurationError, match="not empty and holds no search"):
        tune(PAID, tmp_path / "b")


def test_a_paid_search_does_not_go_on_with_more_or_fewer_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise was computed for the number of records that it was begun with."""
    data = glue_sst2(tmp_path / "data", train=96)
    base = RunConfig(
        task="sst2", data=str(data), model=str(tiny_bert(tmp_path / "bert")), epsilon=3.0, delta=1e-3,
        accountant="rdp", batch_size=24, epochs=2, max_length=32, rank=2, device="cpu", seed=3, validation=0.3,
    )  # fmt: skip
    folder = tmp_path / "tuned"
    with pytest.raises(KeyboardInterrupt):
        tune(Search(base, {"lr": [1e-3, 1e-2]}, runs=3), folder, listener=Crash(at=1))
    lines = (data / "train.tsv").read_text().splitlines(keepends=True)
    monkeypatch.setattr("lsg.train.prepare_data._CACHE", {})  # as in another process
    (data / "train.tsv").write_text("".join(lines[: len(lines) // 2]))
    with pytest.raises(ConfigurationError, match="its epsilon would not hold"):
        tune(None, folder, resume=True)
    (data / "train.tsv").write_text("".join(lines))
    monkeypatch.setattr("lsg.train.prepare_data._CACHE", {})
    assert tune(None, folder, resume=True).statement is not None


def test_private_data_are_not_taken_for_public_ones(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "link").symlink_to(data)
    base = replace(BASE, data=str(data))
    for same in (data, tmp_path / "x" / ".." / "data", tmp_path / "link"):
        with pytest.raises(ConfigurationError, match="is --data itself"):
            Search(base, VARIED, public_data=str(same))
    Search(base, VARIED, public_data=str(tmp_path / "other"))
