"""Language models in `lsg bench`: shapes, weights in half precision, losses per sequence, checkpoints."""

import pytest
import torch

from lsg import LSG, PerfConfig
from lsg.bench.contenders import Setting, attach, contenders
from lsg.bench.presets import workload
from lsg.bench.shapes import preset
from lsg.bench.timing import measure
from lsg.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
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
    encoder = preset("encoder")
    assert encoder.precision("") == "fp32" and encoder.precision("tf32") == "tf32"
    assert LLAMA.precision("") == LLAMA.precision("bf16") == "bf16"
    with pytest.raises(ConfigurationError, match="cpu-llama' has weights in bf16"):
        LLAMA.precision("fp32")
