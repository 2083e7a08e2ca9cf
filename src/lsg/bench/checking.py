"""Checks that a fast path computes the same: its per-sample gradients beside the plain path's, on random inputs."""

import torch
from torch import Tensor

from lsg.bench.contenders import attach
from lsg.bench.presets import workload
from lsg.bench.setting import Setting
from lsg.kernels.optional_triton import without_kernels
from lsg.methods import Method
from lsg.perf import PerfConfig

TOLERANCE = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 5e-2}  # of the gradients' size, by precision
_LAYERS = 2  # of a transformer: enough to meet every kind of layer, and quick to compile
_BATCHES = 6  # the first is run, the second recorded, four are compared and run, the last is replayed alone


def difference(setting: Setting, method: Method, perf: PerfConfig) -> float:
    """|fast - plain| / |plain| over all per-sample gradients of a micro-batch, both in the setting's precision."""
    preset = setting.preset.scaled(layers=_LAYERS, micro_batches=_BATCHES)
    small = Setting(preset, workload(preset, setting.device), setting.device, setting.precision)
    fast = _gradients(small, method, perf)
    with without_kernels():
        plain = _gradients(small, method, PerfConfig(compile=False, cuda_graphs=False))
    return float((fast - plain).norm() / plain.norm())


def _gradients(setting: Setting, method: Method, perf: PerfConfig) -> Tensor:
    """Of the last batch, as one vector. Without dropout, whose random numbers differ between the paths."""
    model = setting.workload.make_model().eval()
    engine, optimizer = attach(setting, model, method, perf, torch.Generator(setting.device).manual_seed(0))
    for x, y in setting.workload.batches:
        optimizer.zero_grad()
        with setting.autocast():
            loss = setting.workload.loss(model, x, y)
        loss.backward()
    found = [part for g in engine.per_sample_gradients().values() for part in (g if isinstance(g, tuple) else (g,))]
    vector = torch.cat([part.float().flatten() for part in found])
    engine.detach()
    return vector
