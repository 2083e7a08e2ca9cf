"""Private training by other libraries: a setting in, a function that takes one logical step out.

Opacus comes with lsg. PEFT (LoRA) and fastDP do not: their contenders are timed where those are installed.
"""

import contextlib
import io
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lsg.bench.setting import Setting, Step

# Contender -> the package that it needs, by the name that it is imported by.
NEEDS = {"lora opacus": "peft", "fastdp": "fastDP"}


def missing_packages() -> dict[str, str]:
    """Contenders that cannot be timed here -> the package that is not installed."""
    return {name: package for name, package in NEEDS.items() if find_spec(package) is None}


def opacus(setting: Setting, mode: str) -> Step:
    """Opacus in mode "hooks" (per-sample gradients) or "ghost" (ghost clipping)."""
    return _opacus_step(setting, setting.workload.make_model(), mode)


def lora_opacus(setting: Setting) -> Step:
    """LoRA by PEFT at the preset's rank, where PEFT puts it by itself, and the head; trained by Opacus (hooks)."""
    from peft import LoraConfig, get_peft_model

    model = setting.workload.make_model()
    task = "CAUSAL_LM" if setting.preset.kind == "causal" else "SEQ_CLS"
    return _opacus_step(setting, get_peft_model(model, LoraConfig(task_type=task, r=setting.preset.rank)), "hooks")


def _opacus_step(setting: Setting, model: nn.Module, mode: str) -> Step:
    from opacus import PrivacyEngine

    made = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        # Opacus gives contiguous gradients to channels-last weights, which the fused kernel refuses.
        optimizer=setting.optimizer(model, fused=setting.preset.kind != "wrn"),
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
                loss = (
                    setting.workload.loss(wrapped, x, y) if criterion is None else _ghost_loss(criterion, wrapped(x), y)
                )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def _ghost_loss(criterion: Any, out: Any, y: torch.Tensor) -> Any:
    """Opacus's own loss, which it differentiates twice. Of labels (B, tokens) each is the token that comes next."""
    logits = (out if isinstance(out, torch.Tensor) else out.logits).float()
    if y.dim() == 1:
        return criterion(logits, y)
    logits, y = logits[:, :-1], y[:, 1:]
    return criterion(logits.flatten(0, 1), y.flatten(), shape=logits.shape)


def fastdp(setting: Setting) -> Step:
    """fastDP in its default mode, book-keeping with mixed ghost norms. Its engine adds the noise and prints a lot."""
    from fastDP import PrivacyEngine

    model = setting.workload.make_model()
    optimizer = setting.optimizer(model, fused=setting.preset.kind != "wrn")
    samples = setting.workload.samples
    with contextlib.redirect_stdout(io.StringIO()):
        engine = PrivacyEngine(
            model,
            batch_size=samples,
            sample_size=4 * samples,
            num_steps=1000,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping_fn="Abadi",
            clipping_mode="MixOpt",
            clipping_style="all-layer",
        )
    engine.attach(optimizer)

    def step() -> None:
        for x, y in setting.workload.batches:
            with setting.autocast():
                loss = setting.workload.loss(model, x, y)
            loss.backward()
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer.step()
        optimizer.zero_grad()

    return step
