"""`lsg bench` on a workload small enough for a test: contenders run, files are written, mistakes are named."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lsg import LSG, PerfConfig
from lsg.bench.contenders import Setting, attach, contenders
from lsg.bench.presets import PRESETS, Preset, precision_of, preset, workload
from lsg.bench.timing import measure
from lsg.cli import app
from lsg.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus warns of its insecure generator and its hooks
CPU = torch.device("cpu")
TINY = Preset("tiny", "encoder", width=32, layers=1, tokens=6, micro_batch=3, micro_batches=2, rank=2, heads=2)


LLAMA = preset("cpu-llama").scaled(tokens=8, layers=1)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_causal_language_model_in_bfloat16_takes_steps(checkpointing: bool) -> None:
    point = LLAMA.scaled(checkpointing=checkpointing)
    setting = Setting(point, workload(point, CPU), CPU, "bf16")
    builders = {name: contenders(setting)[name] for name in ("non-private", "lsg", "rgp", "dpsgd")}
    timings = measure(builders, samples=setting.workload.samples, rounds=1, device=CPU)
    assert [t.name for t in timings if t.error] == [] and setting.workload.samples == 8


def test_its_weights_are_in_bfloat16_and_its_tables_frozen_for_all() -> None:
    one, other = (workload(LLAMA, CPU).make_model() for _ in range(2))
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16} and torch.get_default_dtype() == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert [name for name, p in one.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]
    tied = workload(LLAMA.scaled(tied=True), CPU).make_model()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight  # type: ignore[union-attr]


def test_its_loss_is_a_mean_over_sequences_of_what_transformers_computes_and_knows_no_autocast() -> None:
    point = LLAMA.scaled(weights="fp32")
    work = workload(point, CPU)
    (x, y), *_ = work.batches
    model = work.make_model()
    wanted = torch.stack([model(row[None], labels=row[None]).loss for row in x]).mean()
    torch.testing.assert_close(work.loss(model, x, y), wanted)
    (x, y), *_ = workload(LLAMA, CPU).batches
    model = workload(LLAMA, CPU).make_model()
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(workload(LLAMA, CPU).loss(model, x, y), workload(LLAMA, CPU).loss(model, x, y))
        seen: list[bool] = []
        model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        workload(LLAMA, CPU).loss(model, x, y)
    assert seen == [False]


def test_checkpointing_changes_no_gradient() -> None:
    found = []
    for checkpointing in (True, False):
        point = LLAMA.scaled(checkpointing=checkpointing)
        setting = Setting(point, workload(point, CPU), CPU, "bf16")
        model = setting.workload.make_model()
        engine, optimizer = attach(
            setting, model, LSG(rank=2, sparsity=0.5), PerfConfig(), torch.Generator().manual_seed(0)
        )
        (x, y), *_ = setting.workload.batches
        optimizer.clock.begin_micro_batch(optimizer.clock.enter_epoch(), size=len(x), last=False)
        setting.workload.loss(model, x, y).backward()
        parts = [part for g in engine.per_sample_gradients().values() for part in (g if isinstance(g, tuple) else [g])]
        found.append(torch.cat([part.float().flatten() for part in parts]))
    assert torch.equal(*found)


@pytest.mark.parametrize(("name", "billions"), [("llama-1b", 1.24), ("llama-8b", 8.03)])
def test_large_presets_have_the_shapes_of_their_names(name: str, billions: float) -> None:
    point = preset(name)
    assert point.tokens * point.micro_batch * point.micro_batches == 2**16 and point.checkpointing
    model = workload(point.scaled(micro_batches=1), torch.device("meta")).make_model()
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_half_precision_weights_choose_the_precision() -> None:
    assert precision_of(TINY, "") == "fp32" and precision_of(TINY, "tf32") == "tf32"
    assert precision_of(LLAMA, "") == precision_of(LLAMA, "bf16") == "bf16"
    with pytest.raises(ConfigurationError, match="cpu-llama' has weights in bf16"):
        precision_of(LLAMA, "fp32")


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
