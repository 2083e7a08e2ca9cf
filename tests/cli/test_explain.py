"""`lsg explain`: methods side by side from a configuration alone, one-line errors."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lsg.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.RobertaConfig(vocab_size=100, **sizes).save_pretrained(path)
    return str(path)


def _run(*options: str) -> str:
    result = CliRunner().invoke(app, ["explain", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_text_model_needs_no_weights(folder: str) -> None:
    output = _run("--model", folder, "--rank", "2")
    assert all(name in output for name in ("lsg r=2 p=0.5", "rgp r=2", "sparse-dpsgd", "dpsgd"))
    # Seven matrices are projected, and of the head its last layer and the biases are dense.
    assert [cell.strip() for cell in _row(output, "projected")] == ["7", "7", "0", "0"]
    assert [cell.strip() for cell in _row(output, "dense")] == ["3", "3", "10", "10"]


def test_details_list_the_parameters_of_the_first_method(folder: str) -> None:
    output = _run("--model", folder, "--methods", "rgp", "--rank", "2", "--details")
    assert "encoder.layer.0.intermediate.dense.weight" in output and "r(m+n) = 192 < mn = 2048" in output


@pytest.mark.parametrize(("trainable", "frozen"), [("all", "0"), ("head", "21"), ("paper", "15")])
def test_what_trains_can_be_chosen(folder: str, trainable: str, frozen: str) -> None:
    output = _run("--model", folder, "--methods", "dpsgd", "--trainable", trainable)
    assert [cell.strip() for cell in _row(output, "frozen")] == [frozen]


def test_a_zoo_model_and_its_signal_to_noise() -> None:
    options = ("--model", "small-cnn", "--methods", "dpsgd", "--image-size", "8", "--channels", "1", "--classes", "10")
    once = float(_row(_run(*options, "--batch-size", "1"), "signal to noise")[0])
    batch = float(_row(_run(*options, "--batch-size", "100", "--noise-multiplier", "2"), "signal to noise")[0])
    dimensions = 9 * 32 + 9 * 32 * 64 + 64 * 4 * 10 + 10
    assert once == pytest.approx(dimensions**-0.5, rel=0.01) and batch == pytest.approx(50 * once, rel=0.01)


def _row(output: str, label: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.startswith(f"│ {label}"))
    return line.split("│")[2:-1]


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (["--model", "wrn28-2", "--methods", "magic"], "magic"),
        (["--model", "wrn28-2", "--methods", "non-private"], "non-private"),
        (["--model", "wrn28-2", "--methods", ","], "none given"),
        (["--model", "wrn28-2", "--trainable", "some"], "--trainable 'some'"),
        (["--model", "wrn28-2", "--rank", "0"], "rank=0"),
        (["--model", "wrn28-2", "--noise-multiplier", "0"], "--noise-multiplier 0"),
    ],
)
def test_mistakes_give_one_line(options: list[str], culprit: str) -> None:
    result = CliRunner().invoke(app, ["explain", *options])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and culprit in result.stderr


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["explain", "--model", str(tmp_path)])
    assert result.exit_code == 2 and f"--model {tmp_path}" in result.stderr
