"""Settings: to a file and back, from TOML and YAML, with every mistake named; presets for each task and method."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lsg import ConfigurationError
from lsg.methods import METHODS
from lsg.tasks.catalog import TASKS
from lsg.train.config import RunConfig
from lsg.train.config_file import read_settings, to_toml
from lsg.train.presets import preset


def config(**settings: Any) -> RunConfig:
    return RunConfig(**{"task": "digits", "model": "small-cnn", "epsilon": 3.0, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"data": 'C:\\data\\"quoted"\tüñí \U0001f600\x7f', "lr": 1e-07, "delta": 1e-12, "compile": True},
        {"epsilon": None, "noise_multiplier": 0.5, "importance": "factor", "pair_column": "b", "seed": 2**63 - 1},
    ],
)
def test_a_configuration_survives_its_file(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config(**settings).to_dict()), encoding="utf-8")
    assert RunConfig.from_dict(read_settings(path), str(path)) == config(**settings)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'task = "digits"\nmodel = "small-cnn"\nepsilon = 3\nlr = 1e-3\ncompile = true'),
        ("a.yaml", "task: digits\nmodel: small-cnn\nepsilon: 3\nlr: 1e-3\ncompile: true\ndata:\n"),
        ("a.yml", "{task: digits, model: small-cnn, epsilon: 3.0, lr: 0.001, compile: yes}"),
    ],
)
def test_toml_and_yaml_say_the_same(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found = RunConfig.from_dict(read_settings(tmp_path / name), name)
    assert found == config(lr=1e-3, compile=True)
    assert type(found.epsilon) is float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "m", "epsilon": 1.0}, "f.toml: 'task' is missing"),
        ({"task": "digits", "model": "m", "epsilom": 1.0}, "f.toml: unknown setting 'epsilom'"),
        ({"task": "digits", "model": "m", "epsilon": "much"}, "f.toml: epsilon = 'much' must be a number"),
        ({"task": "digits", "model": "m", "epsilon": True}, "f.toml: epsilon = True must be a number"),
        ({"task": "digits", "model": "m", "epsilon": 1, "epochs": 2.5}, "epochs = 2.5 must be a whole number"),
        ({"task": "digits", "model": "m", "epsilon": 1, "epochs": True}, "epochs = True must be a whole number"),
        ({"task": "digits", "model": "m", "epsilon": 1, "compile": 1}, "compile = 1 must be true or false"),
        ({"task": "digits", "model": 3, "epsilon": 1}, "model = 3 must be text"),
        ({"task": "digits", "model": "m", "epsilon": 1, "importance": 1}, "importance = 1 must be text"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RunConfig.from_dict(values, "f.toml")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "task = ", "a.toml: Invalid value"),
        ("a.yaml", "task: [", "a.yaml: while parsing"),
        ("a.yaml", "- task", "must hold 'name: value' lines"),
        ("a.yaml", "epsilon: 1\nlr: 1\nepsilon: 8\n", "a.yaml: 'epsilon' is given twice .* line 3"),
        ("a.yaml", "epsilon: 1\n'epsilon': 8\n", "'epsilon' is given twice"),
        ("a.yaml", "data: [{deep: {lr: 1, lr: 2}}]\n", "'lr' is given twice"),
        ("a.toml", "epsilon = 1\nepsilon = 8\n", "a.toml: Cannot overwrite a value"),
        ("a.json", "{}", "must end in .toml, .yaml or .yml"),
        ("a.toml", "\udcff", "not a text file"),
    ],
)
def test_a_broken_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigurationError, match=message) as error:
        read_settings(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none.toml: cannot be read \(No such file"):
        read_settings(tmp_path / "none.toml")


def test_an_empty_yaml_file_has_no_settings(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert read_settings(tmp_path / "a.yaml") == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "dp"}, "--method 'dp' must be one of lsg"),
        ({"lr_schedule": "x"}, "--lr-schedule 'x'"),
        ({"epsilon": None}, "needs --epsilon or --noise-multiplier, and not both: 0 were given"),
        ({"noise_multiplier": 1.0}, "and not both: 2 were given"),
        ({"method": "non-private"}, "--epsilon: --method non-private has no privacy budget"),
        ({"epsilon": -1.0}, "--epsilon -1.0 must be positive"),
        ({"epsilon": None, "noise_multiplier": -1.0}, "--noise-multiplier -1.0 must be 0 or more"),
        ({"adam_eps": 0.0}, "--adam-eps 0.0 must be positive"),
        ({"max_physical_batch_size": 0}, "--max-physical-batch-size 0 must be at least 1"),
        ({"max_physical_tokens": 0}, "--max-physical-tokens 0 must be at least 1"),
        ({"seed": -1}, "--seed -1 must be 0 or more"),
        ({"delta": 1.0}, "--delta 1.0 must lie between"),
        ({"sparsity": 1.0}, "sparsity=1.0"),
        ({"warmup": 1.0}, "--warmup 1 must be a share of the steps"),
        ({"averaging": 1.5}, "--averaging 1.5 must be a share of the steps"),
    ],
)
def test_a_bad_value_is_named_by_its_option(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config(**settings)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_and_method_has_a_preset_that_is_a_configuration(task: str, method: str) -> None:
    settings = preset(task, method)
    assert not {"task", "method", "epsilon", "noise_multiplier"} & settings.keys()
    budget = {} if method == "non-private" else {"epsilon": 3.0}
    made = RunConfig(task=task, method=method, **settings, **budget)
    assert dataclasses.asdict(made).items() >= settings.items()


def test_presets_hold_the_papers_numbers() -> None:
    text, images, full = preset("sst2", "lsg"), preset("cifar10", "rgp"), preset("cifar10", "dpsgd")
    assert (text["max_grad_norm"], text["batch_size"], text["epochs"], text["lr"]) == (10, 2000, 20, 1e-3)
    assert (text["delta"], preset("mnli", "lsg")["delta"], text["optimizer"]) == (1e-5, 1e-6, "adam")
    assert (images["max_grad_norm"], images["batch_size"], images["epochs"]) == (1, 1000, 200)
    assert (full["max_grad_norm"], full["batch_size"], full["epochs"]) == (5, 350, 100)
    assert images["lr"] == full["lr"] == 0.5 and images["lr_schedule"] == "steps"


def test_an_unknown_task_has_no_preset() -> None:
    with pytest.raises(ConfigurationError, match="--task 'sst3' is not known"):
        preset("sst3", "lsg")
