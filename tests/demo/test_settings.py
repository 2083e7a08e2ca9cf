"""The demo's settings: rates that the stored search has found, runs that differ in the method alone."""

import json
import statistics
from pathlib import Path

import pytest

from lsg.demo.settings import NETWORK, RATES, Settings

SEARCH = Path(__file__).parents[2] / "results" / "tune" / "demo-rates.jsonl"


@pytest.mark.parametrize("method", RATES)
def test_each_method_has_the_best_rate_of_the_same_search(method: str) -> None:
    rows = [json.loads(line) for line in SEARCH.read_text().splitlines()]
    tried = sorted({row["config"]["lr"] for row in rows})
    scores = {
        lr: [row["score"] for row in rows if (row["config"]["method"], row["config"]["lr"]) == (method, lr)]
        for lr in tried
    }
    assert {len(found) for found in scores.values()} == {2}  # ε = 1 and 3
    means = {lr: statistics.mean(found) for lr, found in scores.items()}
    assert means[RATES[method]] == pytest.approx(max(means.values()), abs=1e-9)
    assert tried[0] < RATES[method] < tried[-1]
    for row in rows:
        config = row["config"]
        assert config["validation"] == 0.2 and not row["modified"]
        assert (config["model"], config["epochs"]) == (NETWORK, Settings.epochs)


def test_private_methods_differ_in_method_and_rate_alone() -> None:
    low_rank, dense = (Settings().configs(method)[0].to_dict() for method in ("lsg", "dpsgd"))
    assert {key for key in low_rank if low_rank[key] != dense[key]} == {"method", "lr"}
    assert [config.epsilon for config in Settings().configs("lsg")] == [1.0, 3.0]
    assert len(Settings().configs("non-private")) == 1
    assert {config.lr for config in Settings(lr=0.3).configs("rgp")} == {0.3}
