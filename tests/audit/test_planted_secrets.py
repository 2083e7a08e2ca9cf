"""Secrets planted in a language model's data: exposed without privacy, near chance with it, and what ε allows."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lsg.audit.exposure import BY_CHANCE, exposures, most_allowed
from lsg.audit.planted_secrets import MOST, REFERENCES, Exposed, audit_secrets, limits
from lsg.cli import app
from lsg.errors import ConfigurationError
from lsg.tasks.data import Documents
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from tests.support.language import tiny_llama, tiny_t5, written


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("secrets")
    return RunConfig(
        task="generate",
        data=str(written(folder / "data")),
        model=str(tiny_llama(folder / "llama", hidden_size=64, intermediate_size=128)),
        method="dpsgd",
        trainable="all",
        epsilon=1.0,
        delta=1e-3,
        accountant="rdp",
        clipping="automatic",
        lr=3e-3,
        batch_size=40,
        epochs=80,
        max_length=24,
        device="cpu",
    )


def test_a_model_without_privacy_knows_the_secrets_and_a_private_one_does_not(
    settings: RunConfig, tmp_path: Path
) -> None:
    parts: list[str] = []
    (tmp_path / "audited-before").mkdir()
    untrained, private, bare = audit_secrets(settings, 20, tmp_path, Listener(), on_part=parts.append)
    assert [one.model for one in (untrained, private, bare)] == ["untrained", "private", "non-private"]
    assert parts == ["the model as it was", "the private model", "the non-private model"]
    assert bare.mean > 4 > private.mean and abs(private.mean - BY_CHANCE) < 4 * BY_CHANCE / math.sqrt(20)
    assert bare.epsilon is bare.allowed is bare.violation is private.violation is None
    assert private.epsilon == pytest.approx(1.0, abs=0.05)
    assert private.allowed == most_allowed(private.epsilon, 1e-3, MOST)
    assert list(tmp_path.iterdir()) == []  # neither model is left behind, nor that of an audit that was killed
    assert limits([untrained, private, bare]) == []


def test_what_shows_nothing_is_said() -> None:
    chance = torch.full((50,), BY_CHANCE)
    large, nothing = limits([Exposed("private", 8.0, 3.0, chance), Exposed("non-private", None, 3.0, chance)])
    assert "epsilon = 8 allows 10.0 of 10 bits" in large and "has not learnt the secrets by heart either" in nothing


def test_more_than_epsilon_allows_is_a_violation() -> None:
    bits = torch.full((50,), 9.0)
    assert Exposed("private", 8.0, 3.0, bits).violation is None
    assert "9.00" in str(Exposed("private", 1.0, 3.0, bits).violation)
    assert Exposed("non-private", None, 3.0, bits).violation is None


def test_what_epsilon_allows_is_what_it_lets_ranks_be() -> None:
    """The mean of the exposure whose tail is as heavy as ε lets it be, summed up over ranks."""
    n = 10**6
    assert most_allowed(100.0, 0.0, 10.0) == 10.0  # there are no more
    assert most_allowed(1.0, 0.01, 10.0) == pytest.approx(most_allowed(1.0, 0.0, 10.0) + 0.1)
    for epsilon in (0.1, 1.0, 3.0):
        ranks = torch.arange(1, n + 1, dtype=torch.float64)
        at_most = (math.exp(epsilon) * ranks / n).clamp(max=1.0)  # probability of this rank or a better one
        mean = float((at_most.diff(prepend=torch.zeros(1, dtype=torch.float64)) * (math.log2(n) - ranks.log2())).sum())
        assert mean == pytest.approx(most_allowed(epsilon, 0.0, math.log2(n)), rel=1e-4)


def test_the_error_is_that_of_secrets_and_of_references() -> None:
    """Many secrets meet the same references: their mean cannot be surer than those are."""
    generator = torch.Generator().manual_seed(0)
    found = [
        Exposed("private", 1e-6, None, exposures(torch.rand(10_000, generator=generator), references))
        for references in torch.rand(200, REFERENCES, generator=generator)
    ]
    spread = torch.tensor([one.mean for one in found]).std().item()
    assert spread == pytest.approx(found[0].error, rel=0.2)
    assert not any(one.violation for one in found)


def test_a_model_whose_likelihoods_are_not_finite_is_no_violation() -> None:
    for value in (math.nan, -math.inf, math.inf):
        bits = exposures(torch.full((50,), value), torch.full((REFERENCES,), value))
        assert Exposed("private", 0.1, 1e30, bits).violation is None


def test_planted_records_are_records_of_their_own() -> None:
    found = Documents(["a", "b"], ["p", "q"], ["x", "x"]).plus(["s", "t"])
    assert list(found.texts) == ["a", "b", "s", "t"] and found.prompts == ["p", "q", "", ""]
    assert found.persons is not None and len(set(found.persons)) == 3
    assert Documents(["a"], None).plus(["s"]).persons is None


@pytest.mark.parametrize(
    "changed", [{"task": "digits", "model": "small-cnn", "data": None}, {"method": "non-private", "epsilon": None}]
)
def test_other_runs_are_refused(settings: RunConfig, changed: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="must hold a private run"):
        audit_secrets(replace(settings, **changed), 20, tmp_path, Listener())  # type: ignore[arg-type]


def test_the_command_with_prompts_persons_and_an_encoder(tmp_path: Path) -> None:
    data, model = written(tmp_path / "data"), tiny_t5(tmp_path / "t5")
    (tmp_path / "run.toml").write_text(
        f'task = "generate"\ndata = "{data}"\nmodel = "{model}"\nunit_column = "who"\nepsilon = 3.0\nepochs = 1\n'
        'accountant = "rdp"\nbatch_size = 10\nseed = 3\ndevice = "cpu"\nmax_length = 32\n'
    )
    options = ["--config", str(tmp_path / "run.toml"), "--output", str(tmp_path / "out")]
    ran = CliRunner().invoke(app, ["audit", "--canaries", "20", *options], env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    assert "20 random secrets" in ran.output and "non-private" in ran.output and "consistent" in ran.output
    document = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert [one["model"] for one in document["models"]] == ["untrained", "private", "non-private"]
    assert all(len(one["exposures"]) == 20 for one in document["models"]) and "seed" not in document["settings"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["audit.json", "figure.png"]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o600}
    assert "has not learnt the secrets by heart either" in ran.output
    ran = CliRunner().invoke(app, ["audit", "--trials", "200", *options])
    assert ran.exit_code == 2 and "--trials attacks the engine" in ran.output
    ran = CliRunner().invoke(app, ["audit", "--canaries", "3", *options])
    assert ran.exit_code == 2 and "--canaries 3 must be between 20" in ran.output
