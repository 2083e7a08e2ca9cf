"""Language models with checkpointed layers, compiled or recorded: one graph, and the gradients of a plain one."""

from functools import partial

import pytest
import torch

from lsg import LSG, PerfConfig
from lsg.bench.contenders import Setting, attach, private
from lsg.bench.presets import workload
from lsg.bench.shapes import preset
from tests.speed.test_graphs import AgainTape

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own compiler warns of itself


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_language_model_is_compiled_as_one_graph(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    point = preset("cpu-llama").scaled(checkpointing=checkpointing)
    setting = Setting(point, workload(point, torch.device("cpu")), torch.device("cpu"), "bf16")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    step = private(setting, LSG(rank=2, sparsity=0.5), PerfConfig(compile=True))
    for _ in range(2):
        step()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


def test_a_recorded_language_model_with_checkpoints_has_the_gradients_of_a_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recording runs the backward, and in it checkpointed layers again, while the model's forward is under way."""
    monkeypatch.setattr("lsg.model.attachment.CudaTape", AgainTape)
    monkeypatch.setattr(PerfConfig, "graphs", lambda self, device: self.cuda_graphs)
    monkeypatch.setattr("lsg.parameters.refresh.Refresh._record", lambda self, sparsity: self._run(sparsity))
    AgainTape.replays, found = 0, []
    point = preset("cpu-llama").scaled(micro_batches=4)
    setting = Setting(point, workload(point, torch.device("cpu")), torch.device("cpu"), "bf16")
    for recorded in (True, False):
        model, noise = setting.workload.make_model(), torch.Generator().manual_seed(0)
        perf = PerfConfig(cuda_graphs=recorded)
        engine, optimizer = attach(setting, model, LSG(rank=2, sparsity=0.5), perf, noise)
        epoch = optimizer.clock.enter_epoch()
        for x, y in setting.workload.batches:
            optimizer.clock.begin_micro_batch(epoch, size=len(x), last=False)
            setting.workload.loss(model, x, y).backward()
            parts = [p for g in engine.per_sample_gradients().values() for p in (g if isinstance(g, tuple) else [g])]
            optimizer.step()
        found.append(torch.cat([part.flatten() for part in parts]))
    assert AgainTape.replays > 2 and torch.equal(*found)


def test_a_compiled_language_model_with_checkpoints_has_the_gradients_of_a_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    found = []
    for compiled in (True, False):
        point = preset("cpu-llama").scaled(weights="fp32", checkpointing=compiled)
        setting = Setting(point, workload(point, torch.device("cpu")), torch.device("cpu"), "fp32")
        model, noise = setting.workload.make_model(), torch.Generator().manual_seed(0)
        engine, optimizer = attach(setting, model, LSG(rank=2, sparsity=0.5), PerfConfig(compile=compiled), noise)
        for x, y in setting.workload.batches:
            optimizer.zero_grad()
            setting.workload.loss(model, x, y).backward()
        parts = [part for g in engine.per_sample_gradients().values() for part in (g if isinstance(g, tuple) else [g])]
        found.append(torch.cat([part.flatten() for part in parts]))
    assert found[1].norm() > 0
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()
