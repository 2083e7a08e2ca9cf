"""Who is timed: each contender is a function that takes one whole logical step on a workload."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsg.bench.presets import Preset, Workload
from lsg.engine import PrivacyEngine
from lsg.errors import ConfigurationError
from lsg.methods import Method, make_method
from lsg.perf import PerfConfig
from lsg.speed.transformers_masks import without_needless_masks
from lsg.step.optimizer import PrivateOptimizer

Step = Callable[[], None]


class Setting:
    """What all contenders share: the workload, the device and the precision ("fp32", "tf32" or "bf16")."""

    def __init__(self, preset: Preset, workload: Workload, device: torch.device, precision: str) -> None:
        if precision not in ("fp32", "tf32", "bf16"):
            raise ConfigurationError(f"precision '{precision}' is unknown; choose from fp32, tf32, bf16")
        if precision == "tf32" and device.type == "cpu":
            raise ConfigurationError("precision tf32 is a GPU's; choose from fp32, bf16")
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = precision != "fp32"
            torch.backends.cudnn.benchmark = True
        self.preset, self.workload, self.device, self.precision = preset, workload, device, precision

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        # Opacus gives contiguous gradients to channels-last weights, which the fused kernel refuses.
        fused = self.device.type == "cuda" and self.preset.kind != "wrn"
        return torch.optim.AdamW(trained, lr=1e-4, fused=fused)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(4 * self.workload.samples)), batch_size=self.workload.samples)


def non_private(setting: Setting, *, compiled: bool) -> Step:
    model = setting.workload.make_model()
    optimizer = setting.optimizer(model)
    if compiled:
        torch._dynamo.config.recompile_limit = 64  # contenders share the model's code, which is compiled for each
    run = torch.compile(model) if compiled else model
    count = len(setting.workload.batches)

    def step() -> None:
        for x, y in setting.workload.batches:
            with setting.autocast():
                loss = setting.workload.loss(run, x, y) / count
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def non_private_without_mask(setting: Setting) -> Step:
    """Compiled, and kept from making an attention mask that masks nothing, as lsg keeps transformers from doing."""
    step = non_private(setting, compiled=True)

    def lean_step() -> None:
        with without_needless_masks():
            step()

    return lean_step


def attach(
    setting: Setting,
    model: nn.Module,
    method: Method,
    perf: PerfConfig | None,
    noise_generator: torch.Generator | None = None,
) -> tuple[PrivacyEngine, PrivateOptimizer]:
    """An engine on a model of the setting."""
    engine = PrivacyEngine(accountant="rdp")
    _, optimizer, _ = engine.make_private(
        module=model,
        optimizer=setting.optimizer(model),
        data_loader=setting.loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=method,
        max_physical_batch_size=setting.preset.micro_batch,
        noise_generator=noise_generator,
        perf=perf,
    )
    return engine, optimizer


def private(setting: Setting, method: Method, perf: PerfConfig | None = None) -> Step:
    model = setting.workload.make_model()
    engine, optimizer = attach(setting, model, method, perf)
    last = len(setting.workload.batches) - 1

    def step() -> None:
        epoch = optimizer.clock.enter_epoch()
        for number, (x, y) in enumerate(setting.workload.batches):
            optimizer.clock.begin_micro_batch(epoch, size=len(x), last=number == last)
            with setting.autocast():
                loss = setting.workload.loss(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    step.engine = engine  # type: ignore[attr-defined]
    return step


def opacus(setting: Setting, mode: str) -> Step:
    """Opacus in mode "hooks" (per-sample gradients) or "ghost" (ghost clipping)."""
    from opacus import PrivacyEngine as OpacusEngine

    model = setting.workload.make_model()
    made = OpacusEngine(accountant="rdp").make_private(
        module=model,
        optimizer=setting.optimizer(model),
        data_loader=setting.loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **({"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}),
    )
    wrapped, optimizer = made[0], made[1]
    criterion: Any = made[2] if mode == "ghost" else None
    last = len(setting.workload.batches) - 1

    def step() -> None:
        for number, (x, y) in enumerate(setting.workload.batches):
            optimizer.signal_skip_step(number != last)
            with setting.autocast():
                if criterion is None:
                    loss = setting.workload.loss(wrapped, x, y)
                else:
                    out = wrapped(x)
                    loss = criterion((out if isinstance(out, torch.Tensor) else out.logits).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


LEAN = "non-private compiled without mask"  # of transformers, the fastest non-private training that we know of
# The ways to run LSG, beside the one that is chosen if nothing is set.
FAST = {
    "lsg eager": PerfConfig(compile=False, cuda_graphs=False),
    "lsg graphs": PerfConfig(compile=False, cuda_graphs=True),
    "lsg compiled": PerfConfig(compile=True, cuda_graphs=False),
    "lsg compiled graphs": PerfConfig(compile=True, cuda_graphs=True),
}


def contenders(setting: Setting) -> dict[str, Callable[[], Step]]:
    """Name -> a function that builds the contender."""
    on_gpu = setting.device.type == "cuda"

    def by(name: str, perf: PerfConfig | None = None) -> Callable[[], Step]:
        method = make_method(name, rank=setting.preset.rank, sparsity=setting.preset.sparsity)
        return lambda: private(setting, method, perf)

    lean = {} if setting.preset.kind == "wrn" else {LEAN: lambda: non_private_without_mask(setting)}
    return {
        "non-private": lambda: non_private(setting, compiled=False),
        "non-private compiled": lambda: non_private(setting, compiled=True),
        **lean,
        "lsg": by("lsg"),
        **{name: by("lsg", perf) for name, perf in FAST.items() if on_gpu or name == "lsg compiled"},
        "rgp": by("rgp"),
        "dpsgd": by("dpsgd"),
        "opacus hooks": lambda: opacus(setting, "hooks"),
        "opacus ghost": lambda: opacus(setting, "ghost"),
    }
