"""`lsg bench` on a workload small enough for a test: contenders run, files are written, mistakes are named."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lsg.bench.contenders import Setting, contenders
from lsg.bench.presets import PRESETS, Preset, preset, workload
from lsg.bench.timing import measure
from lsg.cli import app
from lsg.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus warns of its insecure generator and its hooks
CPU = torch.device("cpu")
TINY = Preset("tiny", "encoder", width=32, layers=1, tokens=6, micro_batch=3, micro_batches=2, rank=2, heads=2)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "wrn"])
def test_every_contender_takes_steps(kind: str) -> None:
    changes = {"kind": kind} | ({"width": 1, "tokens": 8} if kind == "wrn" else {"feed_forward": 48})
    setting = Setting(TINY.scaled(**changes), workload(TINY.scaled(**changes), CPU), CPU, "fp32")
    builders = {n: b for n, b in contenders(setting).items() if "compiled" not in n and "graphs" not in n}
    timings = measure(builders, samples=setting.workload.samples, rounds=2, device=CPU)
    assert [t.name for t in timings if t.error] == []
    assert all(len(t.seconds) == 2 and t.samples_per_second > 0 for t in timings)


def test_a_contender_that_cannot_run_is_reported_and_the_others_go_on() -> None:
    def broken() -> None:
        raise RuntimeError("no such device")

    timings = measure({"broken": lambda: broken, "fine": lambda: lambda: None}, samples=1, rounds=1, device=CPU)
    assert timings[0].error == "RuntimeError: no such device" and timings[1].error is None


def test_the_command_writes_json_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    command = ["bench", "--preset", "tiny", "--device", "cpu", "--rounds", "1", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, [*command, "--only", "non-private,lsg"])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "tiny-fp32-cpu.json").read_text())
    assert [t["name"] for t in document["points"][0]["timings"]] == ["non-private", "lsg"]
    assert document["points"][0]["checks"] == {"lsg": pytest.approx(0.0, abs=1e-6)}
    assert {"command", "versions", "hardware"} <= set(document["provenance"])
    assert (tmp_path / "tiny-fp32-cpu.png").stat().st_size > 1000
    result = CliRunner().invoke(app, [*command, "--sweep", "rank"])
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "tiny-fp32-cpu-rank.json").read_text())["points"]) == 4


@pytest.mark.parametrize(
    ("options", "culprit"),
    [(["--preset", "huge"], "huge"), (["--sweep", "colour"], "colour"), (["--only", "magic"], "magic"),
     (["--precision", "fp8"], "fp8")],
)  # fmt: skip
def test_bad_options_give_one_line_that_names_them(options: list[str], culprit: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *options])
    assert result.exit_code == 2
    assert culprit in result.output and "Traceback" not in result.output


def test_a_fast_path_that_computes_something_else_ends_the_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    monkeypatch.setattr("lsg.bench.checking._gradients", lambda *_: torch.rand(9))
    command = ["bench", "--preset", "tiny", "--device", "cpu", "--only", "lsg", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0 and "gradients differ" in result.output


def test_presets_are_found_by_name() -> None:
    assert preset("encoder").width == 768
    with pytest.raises(ConfigurationError, match="cpu-encoder"):
        preset("none")


def test_on_a_cpu_nothing_of_a_gpu_is_timed() -> None:
    with pytest.raises(ConfigurationError, match="tf32"):
        Setting(TINY, workload(TINY, CPU), CPU, "tf32")
    names = contenders(Setting(TINY, workload(TINY, CPU), CPU, "fp32"))
    assert "lsg compiled" in names and not any("graphs" in name for name in names)


def test_a_missing_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lsg.bench.presets.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="'tiny' needs the package transformers"):
        workload(TINY, CPU).make_model()
