"""How numbers are computed, by name: fp32, tf32 or bf16. Sums, clipping and noise are float32 in all of them."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lsg.errors import ConfigurationError, first_line


def choose_device(name: str) -> torch.device:
    """ "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros((), device=device)
        torch.Generator(device)  # of noise: not every kind of device has one
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigurationError(f"--device {name} cannot be used ({first_line(error):.200})") from None
    return device


def choose_precision(name: str, device: torch.device) -> str:
    """ "auto" is what the device is fastest in."""
    if name == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return name


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Tensor cores for float32 products, unless the name is fp32. What was set before is set again afterwards."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if name == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = name != "fp32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


def autocast(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """Around a model's forward."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if name == "bf16" else nullcontext()
