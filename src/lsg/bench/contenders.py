"""Who is timed: each contender is a function that takes one whole logical step on a workload."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lsg.bench.other_libraries import fastdp, lora_opacus, missing_packages, opacus
from lsg.bench.setting import Setting, Step
from lsg.engine import PrivacyEngine
from lsg.methods import Method, make_method
from lsg.perf import PerfConfig
from lsg.speed.transformers_masks import without_needless_masks
from lsg.step.optimizer import PrivateOptimizer

NON_PRIVATE = "non-private"  # what the names of non-private contenders begin with; this one runs eagerly


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


def non_private_contenders(setting: Setting) -> dict[str, Callable[[], Step]]:
    """Ways to train without privacy: the best of those that run is what private training is compared with."""
    if setting.preset.kind == "wrn":
        channels_first, channels_last = setting.laid_out(torch.contiguous_format), setting.laid_out(torch.channels_last)
        return {
            NON_PRIVATE: partial(non_private, channels_first, compiled=False),
            f"{NON_PRIVATE} channels last": partial(non_private, channels_last, compiled=False),
            # One layout is enough here: the compiler lays convolutions out as it likes.
            f"{NON_PRIVATE} compiled channels last": partial(non_private, channels_last, compiled=True),
        }
    return {
        NON_PRIVATE: partial(non_private, setting, compiled=False),
        f"{NON_PRIVATE} compiled": partial(non_private, setting, compiled=True),
        f"{NON_PRIVATE} compiled without mask": partial(non_private_without_mask, setting),
    }


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


# The ways to run LSG, beside the one that is chosen if nothing is set.
FAST = {
    "lsg eager": PerfConfig(compile=False, cuda_graphs=False),
    "lsg graphs": PerfConfig(compile=False, cuda_graphs=True),
    "lsg compiled": PerfConfig(compile=True, cuda_graphs=False),
    "lsg compiled graphs": PerfConfig(compile=True, cuda_graphs=True),
}


def contenders(setting: Setting) -> dict[str, Callable[[], Step]]:
    """Name -> a function that builds the contender. Those whose package is not installed are left out."""
    missing = left_out(setting)
    return {name: build for name, build in _every_contender(setting).items() if name not in missing}


def left_out(setting: Setting) -> dict[str, str]:
    """Contenders that cannot be timed here -> the package that is not installed."""
    missing = missing_packages()
    return {name: missing[name] for name in _every_contender(setting) if name in missing}


def _every_contender(setting: Setting) -> dict[str, Callable[[], Step]]:
    on_gpu = setting.device.type == "cuda"

    def by(name: str, perf: PerfConfig | None = None) -> Callable[[], Step]:
        method = make_method(name, rank=setting.preset.rank, sparsity=setting.preset.sparsity)
        return lambda: private(setting, method, perf)

    return {
        **non_private_contenders(setting),
        "lsg": by("lsg"),
        **{name: by("lsg", perf) for name, perf in FAST.items() if on_gpu or name == "lsg compiled"},
        "rgp": by("rgp"),
        "dpsgd": by("dpsgd"),
        "opacus hooks": partial(opacus, setting, "hooks"),
        "opacus ghost": partial(opacus, setting, "ghost"),
        **({} if setting.preset.kind in ("wrn", "cnn") else {"lora opacus": partial(lora_opacus, setting)}),
        "fastdp": partial(fastdp, setting),
    }
