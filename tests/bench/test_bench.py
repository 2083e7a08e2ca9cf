"""`lsg bench` on a workload small enough for a test: contenders run, files are written, mistakes are named."""

import io
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lsg.bench.contenders import contenders, left_out
from lsg.bench.presets import workload
from lsg.bench.setting import Setting
from lsg.bench.shapes import PRESETS, Preset, preset
from lsg.bench.timing import Timing, best_non_private, measure
from lsg.cli import app
from lsg.cli.bench import _table
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
    assert document["points"][0]["best_non_private"] == "non-private"
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


def _timing(name: str, seconds: float, error: str | None = None) -> Timing:
    return Timing(name, samples=4, seconds=[seconds], error=error)


def test_ratios_are_against_the_best_non_private_training_that_ran() -> None:
    ran = [_timing("non-private", 2.0), _timing("non-private compiled", 1.0), _timing("lsg", 0.5)]
    failed = _timing("non-private compiled without mask", 0.1, error="out of memory")
    best = best_non_private([*ran, failed])
    assert best is not None and best.name == "non-private compiled"
    assert best_non_private([failed, _timing("lsg", 0.5)]) is None
    lines = io.StringIO()
    Console(file=lines, width=200).print(_table(TINY, "fp32", CPU, [*ran, failed]))
    assert "of the best non-private (compiled)" in lines.getvalue()
    assert [line.split()[-6] for line in lines.getvalue().splitlines() if "lsg" in line] == ["2.00"]


def test_images_are_timed_in_both_layouts_and_texts_without_a_mask() -> None:
    images = TINY.scaled(kind="wrn", width=1, tokens=8)
    setting = Setting(images, workload(images, CPU), CPU, "fp32")
    names = {name for name in contenders(setting) if name.startswith("non-private")}
    assert names == {"non-private", "non-private channels last", "non-private compiled channels last"}
    assert "lora opacus" not in left_out(setting)
    laid_out = setting.laid_out(torch.channels_last)
    for tensor in (laid_out.workload.batches[0][0], laid_out.workload.make_model().stem.weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    assert "non-private compiled without mask" in contenders(Setting(TINY, workload(TINY, CPU), CPU, "fp32"))


def test_what_is_not_installed_is_left_out_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lsg.bench.other_libraries.find_spec", lambda name: None)
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    monkeypatch.setattr("lsg.bench.timing.measure", lambda builders, **_: [_timing(name, 1.0) for name in builders])
    monkeypatch.setattr("lsg.bench.checking.difference", lambda *_: 0.0)
    command = ["bench", "--preset", "tiny", "--device", "cpu", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "fastdp: package fastDP is not installed: left out" in said
    assert "lora opacus: package peft is not installed: left out" in said
    result = CliRunner().invoke(app, [*command, "--only", "fastdp"])
    assert result.exit_code == 2 and "needs the package fastDP" in " ".join(result.output.split())


def test_fastdp_and_lora_get_what_their_libraries_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries are stood in for: neither is a dependency."""
    asked: dict[str, Any] = {}

    class Engine:
        def __init__(self, module: torch.nn.Module, *, batch_size: int, sample_size: int, **settings: Any) -> None:
            print("a lot")
            asked.update(settings, batch_size=batch_size, sample_size=sample_size)

        def attach(self, optimizer: torch.optim.Optimizer) -> None:
            asked["attached"] = optimizer

    def get_peft_model(model: Any, config: dict[str, Any]) -> torch.nn.Module:
        asked.update(config)
        model.roberta.requires_grad_(False)
        return model

    fakes = {"fastDP": {"PrivacyEngine": Engine}, "peft": {"LoraConfig": dict, "get_peft_model": get_peft_model}}
    for name, contents in fakes.items():
        module = ModuleType(name)
        vars(module).update(contents, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    setting = Setting(TINY, workload(TINY, CPU), CPU, "fp32")
    builders = {name: contenders(setting)[name] for name in ("fastdp", "lora opacus")}
    timings = measure(builders, samples=6, rounds=1, device=CPU)
    assert [t.error for t in timings] == [None, None]
    assert asked["batch_size"] == 6 and asked["noise_multiplier"] == 1.0 and "attached" in asked
    assert asked["task_type"] == "SEQ_CLS" and asked["r"] == TINY.rank


def test_only_opacus_goes_without_the_fused_optimizer_on_images(monkeypatch: pytest.MonkeyPatch) -> None:
    images = TINY.scaled(kind="wrn", width=1, tokens=8)
    setting, fused = Setting(images, workload(images, CPU), CPU, "fp32"), []
    make = torch.optim.AdamW

    def noted(*arguments: Any, **settings: Any) -> torch.optim.Optimizer:
        fused.append(settings["fused"])
        return make(*arguments, **settings)

    monkeypatch.setattr(torch.optim, "AdamW", noted)
    for name in ("non-private", "non-private channels last", "lsg", "opacus hooks", "opacus ghost"):
        contenders(setting)[name]()
    assert fused == [True, True, True, False, False]


def test_a_missing_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lsg.bench.presets.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="'tiny' needs the package transformers"):
        workload(TINY, CPU).make_model()
