"""What all contenders of a bench share: a workload, a device and a precision in; autocast, optimizer and loader out."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsg.bench.presets import Workload
from lsg.bench.shapes import Preset
from lsg.errors import ConfigurationError

Step = Callable[[], None]  # takes one whole logical step


class Setting:
    """The workload, the device and the precision ("fp32", "tf32" or "bf16")."""

    def __init__(self, preset: Preset, workload: Workload, device: torch.device, precision: str) -> None:
        if precision == "tf32" and device.type == "cpu":
            raise ConfigurationError("precision tf32 is a GPU's; choose from fp32, bf16")
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = precision != "fp32"
            torch.backends.cudnn.benchmark = True
        self.preset, self.workload, self.device, self.precision = preset, workload, device, precision

    def laid_out(self, memory_format: torch.memory_format) -> "Setting":
        """The same with weights and images in that layout."""
        own = self.workload

        def make_model() -> nn.Module:
            return own.make_model().to(memory_format=memory_format)  # type: ignore[call-overload]

        batches = [(x.contiguous(memory_format=memory_format), y) for x, y in own.batches]
        return Setting(self.preset, replace(own, make_model=make_model, batches=batches), self.device, self.precision)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def optimizer(self, model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
        """AdamW. fused: by PyTorch's fastest kernel, which wants gradients laid out as their parameters are."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-4, fused=fused)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(4 * self.workload.samples)), batch_size=self.workload.samples)
